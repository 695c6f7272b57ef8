// Search of a site that is read from files. Browsers refuse to start a Worker from a file, so here a Worker is a
// hidden frame that runs the same script. Messages sent before the script has run wait for it.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      const script = document.createElement("script");
      script.src = new URL(address, location.href).href;
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.srcdoc = `<!doctype html>${script.outerHTML}`;
      this.ready = new Promise((resolve) => this.frame.addEventListener("load", resolve, { once: true }));
      this.ready.then(() => {
        // What the script sends goes to the page, not to the frame itself.
        this.frame.contentWindow.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      });
      document.body.append(this.frame);
    }

    postMessage(data) {
      this.ready.then(() => {
        const inside = this.frame.contentWindow;
        inside.dispatchEvent(new inside.MessageEvent("message", { data }));
      });
    }

    terminate() {
      this.frame.remove();
    }
  };
}
