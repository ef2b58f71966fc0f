/** The turns of the shown branch. Views are kept from one update to the next, and with them focus and folding. */
import { AnswerView } from "./answer.js";
import { resultCard, resultsForm } from "./calls.js";
import { path, siblings } from "./conversation.js";
import { byId, element, fitHeight, iconButton, toast } from "./dom.js";
import { thumbnails } from "./images.js";

export class Thread {
  #actions;
  #views = new Map(); // id of a turn -> its view
  #conversation = null;

  /**
   * `actions`: retry(turn), edit(turn, text), answerCalls(turn, results, place),
   * show(turn), hasSetting(name), showSetting(name, message), isFree().
   */
  constructor(actions) {
    this.#actions = {
      ...actions,
      forAnswer: (turn, place) => this.#answerTools(turn, place),
    };
    this.element = byId("thread");
    this.scroller = byId("scroller");
    this.scroller.addEventListener("scroll", () => this.#updateJump(), { passive: true });
    byId("jump").addEventListener("click", () => this.toEnd());
  }

  /** Show a conversation's branch; `schema` is the JSON schema of an answer in progress. */
  show(conversation, schema = null) {
    if (conversation !== this.#conversation) this.#views.clear();
    this.#conversation = conversation;
    const turns = path(conversation);
    const refocus = this.#rememberFocus();
    const shown = new Set(turns.map((turn) => turn.id));
    for (const id of this.#views.keys()) if (!shown.has(id)) this.#views.delete(id);
    const elements = turns.map((turn, i) => {
      if (!this.#views.has(turn.id)) this.#views.set(turn.id, this.#makeView(turn, schema));
      const view = this.#views.get(turn.id);
      view.update(turn, this.#place(turn, i === turns.length - 1));
      return view.element;
    });
    // Only elements out of place are moved, because a moved element loses its focus.
    elements.forEach((made, i) => {
      if (this.element.children[i] !== made)
        this.element.insertBefore(made, this.element.children[i] ?? null);
    });
    while (this.element.children.length > elements.length) this.element.lastChild.remove();
    this.element.hidden = !elements.length;
    refocus();
  }

  /** Turns are shown with new buttons: the focused one is found again by its label. */
  #rememberFocus() {
    const at = document.activeElement;
    const turn = this.element.contains(at) ? at.closest(".turn") : null;
    const label = at?.getAttribute("aria-label");
    return () => {
      if (!turn || !label || at.isConnected) return;
      turn.querySelector(`[aria-label="${label}"]`)?.focus();
    };
  }

  /** Show more of an answer in progress. */
  grow(turn) {
    const view = this.#views.get(turn.id);
    if (!view) return;
    const follows = this.isAtEnd();
    view.updateText(turn);
    if (follows) this.toEnd();
    else this.#updateJump();
  }

  focus(turn) {
    this.#views.get(turn.id)?.element.focus({ preventScroll: true });
  }

  toEnd() {
    this.scroller.scrollTop = this.scroller.scrollHeight;
    this.#updateJump();
  }

  holdsFocus() {
    return this.element.contains(document.activeElement);
  }

  /** Start to edit the last message. */
  editLast() {
    const last = path(this.#conversation).findLast((turn) => turn.role === "user");
    if (last) this.#views.get(last.id).edit();
  }

  #makeView(turn, schema) {
    if (turn.role === "assistant") return new AnswerView(turn, this.#actions, schema);
    const View = turn.role === "user" ? MessageView : ResultsView;
    return new View(turn, this.#actions, (shown, place) => this.#pager(shown, place));
  }

  #place(turn, isLast) {
    const all = siblings(this.#conversation, turn);
    return { index: all.indexOf(turn), count: all.length, isLast };
  }

  #answerTools(turn, place) {
    const tools = this.#pager(turn, place);
    if (turn.text && navigator.clipboard) tools.push(copyButton(turn.text));
    if (!turn.error)
      tools.push(iconButton("retry", "Regenerate", () => this.#actions.retry(turn)));
    return tools;
  }

  /** Buttons to switch between the versions of a turn. */
  #pager(turn, { index, count }) {
    if (count < 2) return [];
    const all = siblings(this.#conversation, turn);
    const go = (step) => () => {
      const other = all[index + step];
      this.#actions.show(other);
      const label = step < 0 ? "Previous version" : "Next version";
      const made = this.#views.get(other.id).element;
      const same = made.querySelector(`[aria-label="${label}"]`);
      (same?.disabled ? made.querySelector(".pager button:enabled") : same)?.focus();
    };
    const back = iconButton("back", "Previous version", go(-1), { disabled: index === 0 });
    const forward = iconButton("forward", "Next version", go(1), { disabled: index === count - 1 });
    const where = element("span", { class: "where" }, `${index + 1} / ${count}`);
    where.append(element("span", { class: "visually-hidden" }, " versions"));
    return [element("span", { class: "pager" }, back, where, forward)];
  }

  isAtEnd() {
    const { scrollTop, clientHeight, scrollHeight } = this.scroller;
    return scrollHeight - clientHeight - scrollTop < 60;
  }

  #updateJump() {
    byId("jump").hidden = this.isAtEnd();
  }
}

function copyButton(text) {
  const copy = async () => {
    await navigator.clipboard.writeText(text);
    toast("Copied.");
  };
  return iconButton("copy", "Copy", copy);
}

/** A view that can be turned into a form and back. */
class EditableView {
  constructor(turn, actions, pager) {
    Object.assign(this, { turn, actions, pager });
    this.body = element("div", { class: "body" });
    this.tools = element("div", { class: "turn-actions" });
    this.element = element("li", { class: `turn ${turn.role}`, tabindex: -1 });
    this.element.append(
      element("h2", { class: "visually-hidden" }, this.heading),
      this.body,
      this.tools,
    );
    this.showBody();
  }

  update(turn, place) {
    this.place = place;
    this.showTools();
  }

  showTools() {
    const tools = this.pager(this.turn, this.place);
    const copied = navigator.clipboard && this.turn.text ? [copyButton(this.turn.text)] : [];
    this.editButton = iconButton("edit", this.editLabel, () => this.edit());
    this.tools.replaceChildren(...tools, ...copied, this.editButton);
  }

  edit() {
    if (!this.actions.isFree()) return;
    const form = this.makeForm(() => {
      this.showBody();
      this.tools.hidden = false;
      this.editButton.focus();
    });
    this.element.classList.add("editing");
    this.tools.hidden = true;
    this.body.replaceChildren(form);
    const field = form.querySelector("textarea");
    fitHeight(field);
    field.focus();
    field.setSelectionRange(field.value.length, field.value.length);
  }

  showBody() {
    this.element.classList.remove("editing");
    this.body.replaceChildren(...this.content());
  }
}

/** A message of the user. */
class MessageView extends EditableView {
  get heading() {
    return "You";
  }

  get editLabel() {
    return "Edit message";
  }

  content() {
    const { text, images = [] } = this.turn;
    const shown = images.length ? [thumbnails(images)] : [];
    return text ? [...shown, element("p", { class: "bubble" }, text)] : shown;
  }

  makeForm(done) {
    const field = element("textarea", { "aria-label": "Your message", rows: 2 });
    field.value = this.turn.text;
    const submit = (event) => {
      event?.preventDefault();
      if (!field.value.trim() && !this.turn.images?.length) return;
      done();
      this.actions.edit(this.turn, field.value);
    };
    field.addEventListener("input", () => fitHeight(field));
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
      if (event.key !== "Escape") return;
      event.stopPropagation();
      done();
    });
    const hint = element(
      "p",
      { class: "hint" },
      "The earlier version is kept. Use the arrows to go back to it.",
    );
    const save = element("button", { type: "submit", class: "button primary" }, "Send");
    const cancel = element("button", { type: "button", class: "button", onclick: done }, "Cancel");
    return element(
      "form",
      { class: "edit-form", onsubmit: submit },
      field,
      hint,
      element("div", { class: "form-actions" }, save, cancel),
    );
  }
}

/** Tool results, as the user entered them. */
class ResultsView extends EditableView {
  get heading() {
    return "Tool results";
  }

  get editLabel() {
    return "Edit results";
  }

  content() {
    return this.turn.results.map(resultCard);
  }

  makeForm(done) {
    const calls = this.turn.results.map(({ call, name }) => ({ id: call, name }));
    const texts = this.turn.results.map((result) => result.text);
    const send = (results) => {
      done();
      this.actions.answerCalls({ id: this.turn.parent }, results);
    };
    return resultsForm(calls, send, { texts, oncancel: done });
  }
}
