/**
 * Conversations in this browser's IndexedDB, whole, by their id. Other tabs of the page are notified
 * of changes.
 *
 * Where the browser keeps nothing (some private windows), they live as long as the page.
 */
const NAME = "afm-mlx";
const KIND = "conversations";

export class Store {
  #database = null;
  #channel = globalThis.BroadcastChannel ? new BroadcastChannel(NAME) : null;

  /** `onchange(id)` is called when another tab has written or deleted a conversation. */
  constructor(onchange) {
    if (this.#channel) this.#channel.onmessage = ({ data }) => onchange(data);
  }

  /** All conversations. Raises if the browser keeps nothing. */
  async open() {
    const opening = indexedDB.open(NAME, 1);
    opening.onupgradeneeded = () => opening.result.createObjectStore(KIND, { keyPath: "id" });
    this.#database = await result(opening);
    this.#database.onversionchange = () => this.#database.close();
    return result(this.#database.transaction(KIND).objectStore(KIND).getAll());
  }

  /** The conversation with this id, if there is one. */
  async get(id) {
    if (!this.#database) return undefined;
    return result(this.#database.transaction(KIND).objectStore(KIND).get(id));
  }

  put(conversation) {
    return this.#write(conversation.id, (objects) => objects.put(conversation));
  }

  delete(id) {
    return this.#write(id, (objects) => objects.delete(id));
  }

  async #write(id, change) {
    if (!this.#database) return;
    const transaction = this.#database.transaction(KIND, "readwrite");
    change(transaction.objectStore(KIND));
    transaction.commit(); // at once: the page may be left in the next moment
    await new Promise((resolve, reject) => {
      transaction.oncomplete = resolve;
      transaction.onerror = transaction.onabort = () => reject(transaction.error);
    });
    this.#channel?.postMessage(id);
  }
}

function result(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = request.onblocked = () => reject(request.error);
  });
}
