"use strict";
/* Responses token by token. What is known of a token is told beside it: to a pointer on it, to a tap, and to the keyboard. A response is
   one stop of the tab key; there the arrows, Home and End go from token to token, and Escape puts the figures away. */
const shortNumber = (value) => typeof value === "number" ? Number(value.toPrecision(4)).toString() : "none";
const tokenTold = element("div", "told");
tokenTold.id = "token-told";
tokenTold.setAttribute("role", "status");  // a screen reader says what is written into it
document.body.append(tokenTold);
let toldOf = null;

/* A token, the more coloured the less likely it was. */
function token(text, { logprob, mask = 1, ...more }) {
  const made = element("span", ["token", mask ? "" : "unmasked", mask && more.clipped ? "clipped" : ""].filter(Boolean).join(" "), text);
  if ("clipped" in more) more.clipped = more.clipped ? "yes" : "no";
  made.told = typeof logprob === "number" ? [`p = ${Math.exp(logprob).toPrecision(3)} (log-prob of the engine ${logprob.toFixed(4)})`] : [];
  made.told.push(mask ? "in the loss" : "observed, not in the loss");
  for (const [name, value] of Object.entries(more)) if (value !== null && value !== undefined) made.told.push(`${name} ${typeof value === "number" ? shortNumber(value) : value}`);
  made.style.setProperty("--surprise", typeof logprob === "number" && mask ? Math.min(60, -12 * logprob).toFixed(0) : "0");
  made.setAttribute("role", "option");
  made.tabIndex = -1;
  return made;
}

function tokenList(label, tokens) {
  const list = element("div", "text", ...tokens);
  list.setAttribute("role", "listbox");
  list.setAttribute("aria-label", `${label}: ${tokens.length} tokens, the arrow keys tell of each`);
  if (tokens.length) tokens[0].tabIndex = 0;
  return list;
}

function tellOf(made) {
  toldOf = made;
  tokenTold.textContent = made ? [JSON.stringify(made.textContent), ...made.told].join("\n") : "";
  placeTold();
}

/* Below the token, or above it where the window ends. */
function placeTold() {
  const box = toldOf?.isConnected && toldOf.getClientRects()[0];
  if (!box) { toldOf = null; tokenTold.textContent = ""; return; }
  const { offsetWidth: width, offsetHeight: height } = tokenTold, isLow = box.bottom + 6 + height > innerHeight;
  tokenTold.style.left = `${Math.max(4, Math.min(box.left, document.documentElement.clientWidth - width - 4))}px`;
  tokenTold.style.top = `${isLow ? Math.max(4, box.top - height - 6) : box.bottom + 6}px`;
}

/* The token in the nearest line above (-1) or below (1) that has the nearest place in it. */
function inNextLine(tokens, from, direction) {
  const place = (made) => { const { left, top, height } = made.getClientRects()[0] ?? made.getBoundingClientRect(); return { made, left, top, height }; };
  const here = place(from), others = tokens.map(place).filter(({ top }) => (top - here.top) * direction > here.height / 2);
  const line = others.reduce((least, { top }) => Math.min(least, (top - here.top) * direction), Infinity);
  const inLine = others.filter(({ top, height }) => Math.abs((top - here.top) * direction - line) < height / 2);
  return inLine.sort((a, b) => Math.abs(a.left - here.left) - Math.abs(b.left - here.left))[0]?.made;
}

document.addEventListener("pointerover", (event) => {
  tellOf(event.target.closest(".token") ?? document.activeElement?.closest(".token"));
});
document.addEventListener("focusin", (event) => {
  const made = event.target.closest(".token");
  if (made) {
    for (const other of made.parentElement.querySelectorAll('[tabindex="0"], [aria-selected]')) { other.tabIndex = -1; other.removeAttribute("aria-selected"); }
    made.tabIndex = 0;
    made.setAttribute("aria-selected", "true");
  }
  tellOf(made);
});
document.addEventListener("focusout", (event) => { if (event.target.closest(".token")) tellOf(null); });
document.addEventListener("keydown", (event) => {
  const made = event.target.closest(".token");
  if (!made || event.ctrlKey || event.metaKey || event.altKey) return;
  const tokens = [...made.parentElement.querySelectorAll(".token")], number = tokens.indexOf(made);
  const next = { ArrowRight: () => tokens[number + 1], ArrowLeft: () => tokens[number - 1], Home: () => tokens[0], End: () => tokens.at(-1),
    ArrowDown: () => inNextLine(tokens, made, 1), ArrowUp: () => inNextLine(tokens, made, -1), Escape: () => { tellOf(null); } }[event.key];
  if (!next) return;
  event.preventDefault();
  next()?.focus();
});
addEventListener("scroll", placeTold, { capture: true, passive: true });
