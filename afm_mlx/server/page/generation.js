/** One answer: the request, and its stream read into a turn. */
import { streamChat } from "./api.js";

/**
 * Ask for `turn`, an answer that has not begun, and write what comes into it. `onpiece()` is called when it has
 * grown.
 *
 * Never raises: what went wrong is in the turn's `error`. The stream ends when `signal` is aborted.
 */
export async function generate(turn, body, speedometer, signal, onpiece) {
  let usage = null;
  let timings = null;
  try {
    for await (const chunk of streamChat(body, signal)) {
      usage = chunk.usage ?? usage;
      timings = chunk.timings ?? timings;
      const choice = chunk.choices?.[0];
      if (!choice) continue;
      if (takeDelta(turn, choice.delta ?? {})) {
        speedometer.piece();
        onpiece();
      }
      if (choice.finish_reason) turn.ending = choice.finish_reason;
    }
    turn.end = turn.ending ?? "stop";
  } catch (error) {
    turn.end = error.name === "AbortError" || signal.aborted ? "stopped" : "error";
    if (turn.end === "error") turn.error = described(error);
  }
  delete turn.ending;
  turn.stats = speedometer.stats(usage, timings);
}

/** Add what a chunk holds; false if it holds nothing to show. */
function takeDelta(turn, delta) {
  if (delta.content) turn.text += delta.content;
  for (const part of delta.tool_calls ?? []) {
    const call = (turn.calls[part.index] ??= { id: "", name: "", arguments: "" });
    if (part.id) call.id = part.id;
    call.name += part.function?.name ?? "";
    call.arguments += part.function?.arguments ?? "";
  }
  return Boolean(delta.content || delta.tool_calls?.length);
}

function described(error) {
  const { message, param = null, status = 0, retryAfter = null } = error;
  return { message, param, status, wait: retryAfter };
}
