// Search a built site as a browser does that reads it from files, without a network:
//
//     node scripts/site_search.js build/site WORDS PAGE
//
// It runs the site's own scripts (assets/iframe-worker.js, and the worker that searches) in stand-ins for the page and
// for the hidden frame, and fails if PAGE is not among the first ten results of WORDS.
"use strict";
const fs = require("fs");
const path = require("path");
const vm = require("vm");

const [site, words, wanted] = process.argv.slice(2);
const root = path.resolve(site);
const folder = path.join(root, "assets/javascripts/workers");
const [worker] = fs.readdirSync(folder).filter((name) => name.endsWith(".js"));

// A frame that runs the script of its srcdoc in a context of its own, and then reports that it has loaded.
function load(frame) {
  const [, source] = /src="([^"]+)"/.exec(frame.srcdoc);
  const target = new EventTarget();
  const inside = {
    console, URL, MessageEvent,
    addEventListener: target.addEventListener.bind(target),
    dispatchEvent: target.dispatchEvent.bind(target),
    postMessage: () => { throw new Error("the answer went to the frame, not to the page"); },
  };
  inside.self = inside.window = inside;
  vm.runInContext(fs.readFileSync(new URL(source), "utf-8"), vm.createContext(inside));
  frame.contentWindow = inside;
  setTimeout(() => frame.dispatchEvent(new Event("load")));
}

function createElement(tag) {
  if (tag === "iframe") return Object.assign(new EventTarget(), { remove: () => {} });
  return { get outerHTML() { return `<script src="${this.src}"></script>`; } };
}

const page = { EventTarget, MessageEvent, URL, Promise, document: { createElement, body: { append: load } } };
page.window = page;
page.location = { protocol: "file:", href: `file://${root}/index.html` };
vm.createContext(page);
vm.runInContext(fs.readFileSync(path.join(root, "assets/iframe-worker.js"), "utf-8"), page);
// The index as it is for files: a script that sets __index.
const index = vm.runInNewContext(`${fs.readFileSync(path.join(root, "search/search_index.js"), "utf-8")}; __index`);

process.exitCode = 1; // no answer is a failure, too
const search = new page.window.Worker(`assets/javascripts/workers/${worker}`);
search.addEventListener("message", ({ data: answer }) => {
  if (answer.type === 1) return search.postMessage({ type: 2, data: words });
  const found = answer.data.items.slice(0, 10).map(([{ location }]) => location.split("#")[0]);
  process.exitCode = found.includes(wanted) ? 0 : 1;
  if (process.exitCode) console.error(`'${words}' finds ${found.join(", ") || "nothing"}, not ${wanted}`);
});
search.postMessage({ type: 0, data: { config: index.config, docs: index.docs, options: { suggest: false } } });
