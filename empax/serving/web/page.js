"use strict";
// Whatever people or models have written goes in by textContent alone, so it stays text.
const at = (id) => document.getElementById(id);
const make = (name, text = "", kind = "") => {
  const node = document.createElement(name);
  node.textContent = text;
  if (kind) node.className = kind;
  return node;
};
let about = null, sides = [], conversation = null, running = null;

class Lost extends Error {}  // the server does not answer, or not to the end

const stored = (area, name, fresh = "") => area.getItem(name) || (fresh && (area.setItem(name, fresh), fresh));
const fetched = async (path, body, signal) => {
  const headers = { "Content-Type": "application/json" };
  const token = stored(sessionStorage, "token");
  if (token) headers.Authorization = `Bearer ${token}`;
  const how = body === undefined ? { headers, signal } : { method: "POST", headers, signal, body: JSON.stringify(body) };
  const answer = await fetch(path, how).catch(lost);
  if (answer.status === 401) {
    at("key").hidden = false;
    at("token").focus();
    throw new Error(token ? "This token is not the server's." : "This server asks for a token.");
  }
  if (!answer.ok) throw new Error((await answer.json().catch(lost)).error.message);
  return answer;
};
const lost = (error) => { throw error.name === "AbortError" ? error : new Lost(error.message); };
const pause = (milliseconds, signal) => new Promise((resolve, reject) => {
  signal.throwIfAborted();
  signal.addEventListener("abort", () => reject(signal.reason), { once: true });
  setTimeout(resolve, milliseconds);
});
const tell = (text, failed = false) => {
  at("status").textContent = text;
  at("status").className = failed ? "error" : "";
};

// Does `work`; where the server is lost, says so, waits until it is back, and does it again.
async function withServer(work, signal, again = () => {}) {
  for (let wait = 500; ; wait = Math.min(2 * wait, 8000)) {
    try {
      return await work();
    } catch (error) {
      if (!(error instanceof Lost)) throw error;
    }
    tell("The server does not answer. Your conversation is kept, and continues when the server is back.", true);
    do await pause(wait, signal); while (!await fetch("healthz").then((answer) => answer.ok, () => false));
    tell("The server is back.");
    again();
  }
}

async function begin() {
  if (running) running.abort();
  about ??= await (await fetched("about")).json();
  at("safety").textContent = about.safety;
  at("model").textContent = about.model || "two systems, side by side";
  at("settings").hidden = !(about.options || []).length;
  for (const input of document.querySelectorAll("#settings input")) {
    input.parentNode.hidden = !(about.options || []).includes(input.id);
  }
  conversation = about.compares ? (await (await fetched("conversations", {})).json()).conversation : null;
  sides = (about.compares ? ["a", "b"] : [""]).map((name) => {
    const box = make("section", "", "side"), log = make("div");
    log.setAttribute("role", "log");
    log.setAttribute("aria-label", name ? `Conversation with ${name.toUpperCase()}` : "Conversation");
    box.append(...(name ? [make("h2", name.toUpperCase())] : []), log);
    return { name, log, box, messages: [], model: name ? `${conversation}/${name}` : about.model };
  });
  at("sides").replaceChildren(...sides.map((side) => side.box));
  at("vote").hidden = true;
  at("send").disabled = at("text").disabled = false;
  tell("");
  at("text").focus();
}

// Gives back what shows the reply. One of a blinded conversation is not seen before: pace and order would tell.
async function reply(side, text, signal) {
  side.messages.push({ role: "user", content: text });
  const own = make("div", text, "turn user");
  own.setAttribute("role", "group");
  own.setAttribute("aria-label", "You");
  side.log.append(own);
  const turn = make("div", "…", "turn");
  turn.setAttribute("role", "group");
  turn.setAttribute("aria-label", "Reply");
  turn.setAttribute("aria-busy", "true");  // read out once it is whole
  side.log.append(turn);
  toFoot();
  const asked = { model: side.model, messages: side.messages, stream: true };
  for (const name of about.options || []) if (at(name).value) asked[name] = Number(at(name).value);
  const answer = await fetched("v1/chat/completions", asked, signal);
  let said = "", rest = "", why = {}, whole = false;
  const show = () => {
    const stays = atFoot();
    turn.textContent = said || (whole ? "(nothing)" : "…");
    if (whole) turn.removeAttribute("aria-busy");
    if (whole && Object.keys(why).length) turn.append(explained(why));
    if (stays) toFoot();
  };
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { done, value: part } = await reader.read().catch(lost);
    if (done) break;
    const events = (rest + part).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      whole ||= event === "data: [DONE]";
      if (whole) continue;
      const told = JSON.parse(event.slice(6));
      if (told.error) throw new Error(told.error.message);
      const choice = told.choices[0];
      said += choice.delta.content || "";
      why = choice.empax || why;
    }
    if (!conversation && !whole) show();
  }
  if (!whole) throw new Lost("the reply broke off.");
  side.messages.push({ role: "assistant", content: said });
  return show;
}

// What is new stays in sight, unless somebody reads further up.
const atFoot = () => {
  const page = document.scrollingElement;
  return page.scrollHeight - page.scrollTop - page.clientHeight < 160;
};
const toFoot = () => { document.scrollingElement.scrollTop = document.scrollingElement.scrollHeight; };

function takeBack(side, messages, turns) {
  side.messages.length = messages;
  while (side.log.children.length > turns) side.log.lastChild.remove();
}

function explained(why) {
  if (why.fixed) return make("p", "A fixed answer, not the model's.", "quiet");
  const box = make("details", "", "why"), list = make("dl");
  box.append(make("summary", "Why this reply"), list);
  const add = (title, ...values) => {
    list.append(make("dt", title));
    for (const value of values) {
      const one = make("dd");
      one.append(value);
      list.append(one);
    }
  };
  if (why.emotion) add("You seem", why.emotion);
  for (const [name, level] of Object.entries(why.attributes || {})) add(name.replaceAll("_", " "), level);
  if (why.reasons) add("Reasons", why.reasons);
  if (why.intents) add("Intents", why.intents.join(" → "));
  if (why.facts) add("Facts", ...why.facts);
  if (why.exemplars) add("What others were told", ...why.exemplars.map((found) => {
    const quote = make("blockquote", `${found.said} → ${found.reply}`);
    const score = found.score == null ? "" : `score ${found.score}`;
    quote.append(make("p", [found.emotion, score, found.source].filter(Boolean).join(", "), "quiet"));
    return quote;
  }));
  return box;
}

function showVote() {
  if (!conversation || !at("vote").hidden) return;
  at("aspects").replaceChildren(at("aspects").firstElementChild, ...about.aspects.map((aspect) => {
    const row = make("div", "", "aspect");
    row.setAttribute("role", "radiogroup");
    row.setAttribute("aria-label", aspect);
    row.append(make("b", aspect), ...["a", "tie", "b"].map((value) => {
      const label = make("label"), input = make("input");
      Object.assign(input, { type: "radio", name: aspect, value, required: true });
      label.append(input, ` ${value === "tie" ? "Tie" : value.toUpperCase()}`);
      return label;
    }));
    return row;
  }));
  at("vote").hidden = false;
  toFoot();
}

const guarded = (work) => async (event) => {
  event?.preventDefault();
  try { await work(); } catch (error) { if (error.name !== "AbortError") tell(error.message, true); }
};

at("say").addEventListener("submit", guarded(async () => {
  const text = at("text").value.trim();
  if (!text || !sides.length || running) return;
  running = new AbortController();
  const own = running, asked = sides.map((side) => [side, side.messages.length, side.log.children.length]);
  at("text").value = "";
  at("send").disabled = true;
  tell("Writing …");
  try {
    await withServer(async () => {
      const done = await Promise.allSettled(sides.map((side) => reply(side, text, own.signal)));
      const failed = done.find((one) => one.status === "rejected");
      if (failed) throw failed.reason;
      for (const one of done) one.value();
    }, own.signal, () => asked.forEach((one) => takeBack(...one)));
    tell("");
    showVote();
  } catch (error) {
    own.abort();
    asked.forEach((one) => takeBack(...one));
    if (error.name !== "AbortError") at("text").value = text;
    throw error;
  } finally {
    if (running === own) running = null;
    at("send").disabled = false;
  }
}));
at("text").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  at("say").requestSubmit();
});
at("vote").addEventListener("submit", guarded(async () => {
  if (running) throw new Error("Vote once both replies are there.");
  const answers = Object.fromEntries(new FormData(at("vote")));
  const rater = stored(localStorage, "rater", Array.from(crypto.getRandomValues(new Uint8Array(6)), (n) => n.toString(16)).join(""));
  const who = await (await fetched("votes", { conversation, rater, answers })).json();
  at("vote").hidden = true;
  at("send").disabled = at("text").disabled = true;
  tell(`Thank you. A was ${who.a}, B was ${who.b}. A new conversation draws again.`);
  at("new").focus();
}));
let opening = new AbortController();
const open = guarded(() => {
  opening.abort();
  opening = new AbortController();
  return withServer(begin, opening.signal);
});
at("new").addEventListener("click", open);
at("key").addEventListener("submit", guarded(async () => {
  sessionStorage.setItem("token", at("token").value);
  at("key").hidden = true;
  await open();
}));
open();
