// Runs the search in an iframe if the pages are opened as files, because browsers start no workers for files.
if (location.protocol === 'file:') {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement('iframe');
      frame.hidden = true;
      document.body.appendChild(frame);
      this.inner = frame.contentWindow;
      addEventListener('message', (event) => {
        if (event.source !== this.inner) return;
        this.dispatchEvent(new MessageEvent('message', { data: event.data }));
        this.onmessage?.(event);
      });
      this.loaded = new Promise((resolve) => {
        const page = this.inner.document;
        page.open();
        // `importScripts` of a worker is synchronous; in a page, scripts load one after the other.
        page.write(`<script>
          postMessage = (data) => parent.dispatchEvent(new MessageEvent('message', { data, source: window }));
          importScripts = (...urls) => urls.reduce((done, url) => done.then(() => new Promise((resolve, reject) => {
            const script = document.createElement('script');
            Object.assign(script, { src: url, onload: resolve, onerror: reject });
            document.body.appendChild(script);
          })), Promise.resolve());
        </script><body><script src="${url}"></script></body>`);
        page.close();
        this.inner.addEventListener('load', resolve);
      });
    }
    postMessage(data) {
      this.loaded.then(() => this.inner.dispatchEvent(new MessageEvent('message', { data })));
    }
    terminate() {
      this.inner.frameElement.remove();
    }
  };
  window.IFrameWorker = window.Worker;
}
