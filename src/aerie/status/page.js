"use strict";
// Fetches this very page again and lets what differs into the one on screen. There is one renderer, the server's; scroll,
// focus, selection and opened details stay, since what has not changed is not touched.
const EVERY = 1000; // ms between two looks
const PATIENCE = 5000; // ms for an answer

function adopt(node, fresh) {
  if (node.nodeName !== fresh.nodeName || node.id !== fresh.id) {
    node.replaceWith(fresh);
    return;
  }
  if (node.nodeType !== Node.ELEMENT_NODE) {
    if (node.data !== fresh.data) node.data = fresh.data;
    return;
  }
  for (const { name, value } of fresh.attributes) {
    if (node.getAttribute(name) !== value) node.setAttribute(name, value);
  }
  for (const { name } of [...node.attributes]) {
    if (!fresh.hasAttribute(name) && name !== "open") node.removeAttribute(name); // `open` is the reader's
  }
  const old = [...node.childNodes];
  const now = [...fresh.childNodes];
  now.forEach((child, i) => (i < old.length ? adopt(old[i], child) : node.append(child)));
  old.slice(now.length).forEach((child) => child.remove());
}

const connection = document.getElementById("connection");
let answered = new Date();

async function look() {
  const answer = await fetch(location.href, { cache: "no-store", signal: AbortSignal.timeout(PATIENCE) });
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  const same = (selector) => fresh.querySelector(selector)?.textContent === document.querySelector(selector).textContent;
  if (!answer.ok || !fresh.getElementById("connection")) throw new Error(`answered ${answer.status}`);
  if (!same("style") || !same("script")) return location.reload(); // another release's page
  document.title = fresh.title;
  adopt(document.querySelector("link"), fresh.querySelector("link"));
  document.body.className = fresh.body.className;
  for (const part of ["header", "main", "footer"]) adopt(document.querySelector(part), fresh.querySelector(part));
  connection.textContent = "";
  answered = new Date();
}

function sayGone() {
  if (connection.textContent) return; // said once, lest it be read out every second
  connection.textContent =
    `The supervisor has not answered since ${answered.toLocaleTimeString()}. What stands below is from then. ` +
    "This page looks again every second.";
}

(async () => {
  for (;;) {
    await new Promise((resume) => setTimeout(resume, EVERY));
    await look().catch(sayGone);
  }
})();
