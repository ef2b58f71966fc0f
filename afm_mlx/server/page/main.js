/** The page: holds the conversations, and connects all parts. */
import { listModels, onKeyNeeded } from "./api.js";
import { Answers } from "./answers.js";
import { Composer } from "./composer.js";
import { addTurn, newConversation, openCalls, path, showBranch } from "./conversation.js";
import { SidePanel, askForKey, bindMenus, bindShortcuts } from "./dialogs.js";
import { byId, toast } from "./dom.js";
import { Context, MeterView } from "./meter.js";
import { SAMPLING, SettingsForm, answerSchema, defaultSettings } from "./settings.js";
import { Sidebar, bindThemeSwitch } from "./sidebar.js";
import { Store } from "./store.js";
import { Thread } from "./thread.js";
import { bindTransfer } from "./transfer.js";
import { showExamples } from "./welcome.js";

const FIRST_WAIT_MS = 2000; // between attempts to reach the server
const LONGEST_WAIT_MS = 30_000;

class App {
  conversations = new Map();
  current = newConversation();
  models = [];

  constructor() {
    this.store = new Store((id) => this.#changedElsewhere(id));
    this.meter = new MeterView();
    this.panel = new SidePanel("panel", "(min-width: 1180px)", false);
    this.sidebar = new SidePanel("sidebar", "(min-width: 820px)", true);
    this.list = new Sidebar({
      open: (id) => this.open(id),
      rename: (id, title) => this.#rename(id, title),
      remove: (id) => this.remove(id),
    });
    this.settings = new SettingsForm(() => this.settingsChanged());
    this.composer = new Composer({
      send: (text, images) => this.send(text, images),
      stop: () => this.stop(),
      editLast: () => this.thread.editLast(),
      changed: () => this.context.typed(),
      set: (values) => this.settings.set(values),
      showSettings: (field) => this.showSettings(field),
    });
    this.thread = new Thread({
      retry: (turn) => this.#isFree() && this.answer(turn.parent),
      edit: (turn, text) => this.#edit(turn, text),
      answerCalls: (turn, results) => this.#answerCalls(turn, results),
      show: (turn) => this.#showTurn(turn),
      hasSetting: (name) => this.settings.has(name),
      showSetting: (name, message) => this.#showProblem(name, message),
      isFree: () => this.#isFree(),
    });
    this.answers = new Answers({
      grew: (conversation, turn, speedometer) => this.#grew(conversation, turn, speedometer),
      ended: (conversation, turn, speedometer) => this.#ended(conversation, turn, speedometer),
      save: (conversation) => this.save(conversation),
    });
    this.context = new Context(this);
  }

  async start() {
    onKeyNeeded(askForKey);
    bindMenus();
    bindThemeSwitch();
    bindTransfer(this);
    bindShortcuts(this);
    byId("new-chat").addEventListener("click", () => this.startNew());
    byId("retry-connection").addEventListener("click", () => this.#loadModels());
    byId("skip").addEventListener("click", (event) => {
      event.preventDefault();
      this.composer.focus();
    });
    addEventListener("popstate", () => this.#followAddress());
    this.settings.show(this.current.settings);
    await this.#loadConversations();
    this.#followAddress();
    document.documentElement.dataset.ready = "true";
    await this.#loadModels();
  }

  // --- the current conversation ---

  /** Show the current conversation. */
  show() {
    const { current } = this;
    this.thread.show(current, answerSchema(current.settings));
    byId("welcome").hidden = current.head !== null;
    byId("title").textContent = current.head === null ? "New chat" : current.title;
    document.title = current.head === null ? "afm-mlx" : `${current.title} · afm-mlx`;
    byId("export-menu-button").disabled = current.head === null;
    this.#showComposer();
    this.#list();
    this.context.show();
  }

  #showComposer() {
    this.composer.show(this.current.settings, {
      running: this.isRunning(),
      openCalls: openCalls(this.current).length,
      sees: Boolean(this.model()?.capabilities?.vision),
    });
  }

  #list() {
    this.list.show([...this.conversations.values()], this.current.id, this.answers.running());
  }

  isRunning() {
    return this.answers.isRunning(this.current);
  }

  #set(conversation) {
    if (conversation === this.current) return;
    this.composer.keepDraft(this.current.id);
    this.current = conversation;
    this.#useKnownModel();
    this.settings.show(conversation.settings);
    this.composer.restoreDraft(conversation.id);
    this.show();
    this.thread.toEnd();
  }

  open(id) {
    if (this.sidebar.covers) this.sidebar.toggle(false);
    this.#go(id);
  }

  /** Put the id into the address, for reloads and the browser's history; "" is a new chat. */
  #go(id) {
    if (location.hash.slice(1) !== id)
      history.pushState(null, "", id ? `#${id}` : location.pathname);
    this.#followAddress();
  }

  startNew() {
    if (this.sidebar.covers) this.sidebar.toggle(false);
    const { system, format, schema, tools, tool_choice } = defaultSettings();
    if (this.current.head === null)
      this.settings.set({ system, format, schema, tools, tool_choice });
    this.#go("");
    this.composer.focus();
  }

  #followAddress() {
    const id = location.hash.slice(1);
    const known = this.conversations.get(id);
    if (known) this.#set(known);
    // A new chat keeps the model and the sampling of the chat before.
    else if (this.current.head !== null) {
      const kept = ["model", ...SAMPLING].map((name) => [name, this.current.settings[name]]);
      this.#set(newConversation({ ...defaultSettings(), ...Object.fromEntries(kept) }));
    } else this.show();
  }

  // --- answers ---

  send(text, images) {
    if (!this.settings.isRight()) {
      this.showSettings();
      this.settings.focusProblem();
      return false;
    }
    addTurn(this.current, this.current.head, { role: "user", text, images });
    this.answer(this.current.head);
    return true;
  }

  /** Answer the turn with this id under the current settings. */
  answer(parent) {
    const { current } = this;
    const turn = this.answers.begin(current, parent);
    this.conversations.set(current.id, current);
    if (location.hash.slice(1) !== current.id) history.pushState(null, "", `#${current.id}`);
    const before = this.thread.holdsFocus();
    this.show();
    this.thread.toEnd();
    if (before) this.#focusAfter(turn);
  }

  /** Focus the message field, or on touch screens, where that would open the keyboard, the turn. */
  #focusAfter(turn) {
    if (matchMedia("(pointer: coarse)").matches) this.thread.focus(turn);
    else this.composer.focus();
  }

  stop() {
    this.answers.stop(this.current);
  }

  #grew(conversation, turn, speedometer) {
    if (conversation !== this.current) return;
    this.thread.grow(turn);
    this.context.measured(turn, speedometer);
  }

  #ended(conversation, turn, speedometer) {
    if (conversation !== this.current) return this.#list();
    this.context.measured(turn, speedometer);
    const follows = this.thread.isAtEnd();
    this.show();
    if (follows) this.thread.toEnd();
  }

  /** True if turns may change; otherwise a notice is shown. */
  #isFree() {
    if (this.isRunning()) toast("Stop the current answer first.");
    return !this.isRunning();
  }

  #edit(turn, text) {
    if (!this.#isFree()) return;
    addTurn(this.current, turn.parent, { role: "user", text, images: turn.images ?? [] });
    this.answer(this.current.head);
  }

  #answerCalls(turn, results) {
    if (!this.#isFree()) return;
    addTurn(this.current, turn.id, { role: "results", results });
    this.answer(this.current.head);
  }

  #showTurn(turn) {
    if (!this.#isFree()) return;
    showBranch(this.current, turn);
    this.save(this.current);
    this.show();
  }

  // --- settings ---

  settingsChanged() {
    this.#showComposer();
    this.context.show();
    if (this.current.head !== null) this.save(this.current);
  }

  showSettings(field = null) {
    this.panel.toggle(true);
    if (field) this.settings.focus(field);
  }

  #showProblem(name, message) {
    this.showSettings();
    this.settings.point(name, message);
  }

  // --- conversations and the browser ---

  async #loadConversations() {
    try {
      for (const conversation of await this.store.open()) this.add(conversation);
    } catch {
      toast("This browser doesn't allow storage. Chats are lost when the page is closed.");
    }
  }

  /** Add a stored conversation; its unfinished answers are marked as interrupted. */
  add(conversation) {
    for (const turn of Object.values(conversation.turns)) {
      if (turn.role === "assistant" && turn.end === null) turn.end = "lost";
    }
    this.conversations.set(conversation.id, conversation);
  }

  async save(conversation) {
    if (!this.conversations.has(conversation.id)) return;
    try {
      await this.store.put(conversation);
    } catch (error) {
      toast(`The chat couldn't be saved: ${error.message}`);
    }
  }

  async #changedElsewhere(id) {
    const known = this.conversations.get(id);
    if (known && this.answers.isRunning(known)) return;
    const found = await this.store.get(id);
    if (found) this.conversations.set(id, found);
    else this.conversations.delete(id);
    if (id === this.current.id && found) {
      this.current = found;
      this.settings.show(found.settings);
      this.show();
    } else this.#list();
  }

  #rename(id, title) {
    const conversation = this.conversations.get(id);
    Object.assign(conversation, { title, renamed: true });
    this.save(conversation);
    this.show();
  }

  remove(id) {
    const conversation = this.conversations.get(id);
    this.answers.stop(conversation);
    this.conversations.delete(id);
    this.store.delete(id);
    if (conversation === this.current) {
      history.replaceState(null, "", location.pathname);
      this.#followAddress();
    }
    this.#list();
    const undo = () => {
      this.conversations.set(id, conversation);
      this.save(conversation);
      this.open(id);
      this.#list();
    };
    toast(`Deleted “${conversation.title}”.`, { label: "Undo", run: undo });
  }

  // --- models ---

  async #loadModels(wait = FIRST_WAIT_MS) {
    clearTimeout(this.nextAttempt);
    try {
      this.models = await listModels();
      byId("connection").hidden = true;
    } catch (error) {
      byId("connection-message").textContent = error.message;
      byId("connection").hidden = false;
      if (error.status !== 401) {
        this.nextAttempt = setTimeout(
          () => this.#loadModels(Math.min(2 * wait, LONGEST_WAIT_MS)),
          wait,
        );
      }
      return;
    }
    this.#useKnownModel();
    this.composer.setModels(this.models);
    showExamples(this.models, (example) => this.#useExample(example));
    this.show();
  }

  /** Replace a model that this server doesn't have. */
  #useKnownModel() {
    const { settings } = this.current;
    if (!this.models.length || this.models.some(({ id }) => id === settings.model)) return;
    settings.model = this.models[0].id;
  }

  #useExample({ text, settings }) {
    const base = this.models[0].id;
    this.settings.set({ format: "text", schema: "", tools: "", model: base, ...settings });
    this.composer.write(text);
  }

  model() {
    return this.models.find(({ id }) => id === this.current.settings.model) ?? null;
  }

  /** The shown turns. */
  path() {
    return path(this.current);
  }
}

new App().start();
