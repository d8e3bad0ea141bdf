// API client: requests, and reading of streamed responses.

class ServerError extends Error {
  constructor(message, status, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

const capitalized = (message) => message[0].toUpperCase() + message.slice(1);

async function call(path, options = {}) {
  const headers = { ...(options.body && { 'Content-Type': 'application/json' }) };
  if (settings.key) headers.Authorization = `Bearer ${settings.key}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === 'AbortError') throw error;
    throw new ServerError('The server cannot be reached.', 0);
  }
  if (response.ok) return response;
  let message = `The server returned status ${response.status}.`;
  let code;
  try {
    const { error } = await response.json();
    message = capitalized(error.message);
    code = error.code;
  } catch {
    // The response does not come from this server, for example from a proxy.
  }
  throw new ServerError(message, response.status, code);
}

// Yields { text, finish, tokens, dropped } for each chunk. Only the last chunk has `tokens`. `dropped` is the number of
// messages that do not fit the context.
async function* stream(path, body, signal) {
  const request = { ...body, stream: true, stream_options: { include_usage: true } };
  const response = await call(path, { method: 'POST', body: JSON.stringify(request), signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = '';
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new ServerError('The connection was lost.', 0);
      const events = (buffer + value).split('\n\n');
      buffer = events.pop();
      for (const event of events) {
        if (!event.startsWith('data: ')) continue;
        if (event === 'data: [DONE]') return;
        const data = JSON.parse(event.slice(6));
        if (data.error) throw new ServerError(capitalized(data.error.message), 200);
        const choice = data.choices[0];
        const text = choice ? choice.delta?.content ?? choice.text ?? '' : '';
        yield { text, finish: choice?.finish_reason, tokens: data.usage?.completion_tokens, dropped: data.dropped_messages };
      }
    }
  } catch (error) {
    if (error.name === 'AbortError' || error instanceof ServerError) throw error;
    throw new ServerError('The connection was lost.', 0);
  }
}

// Counts the tokens of a streamed response and measures its throughput.
class StreamStats {
  constructor() {
    this.chunks = 0;
    this.tokens = 0;
    this.firstTime = 0;
    this.lastTime = 0;
  }

  add(chunk) {
    if (chunk.tokens !== undefined) this.tokens = chunk.tokens;
    if (!chunk.text) return;
    this.lastTime = performance.now();
    this.firstTime ||= this.lastTime;
    this.chunks++;
  }

  get summary() {
    const count = this.tokens || this.chunks;
    const seconds = (this.lastTime - this.firstTime) / 1000;
    const speed = (count - 1) / seconds;
    const rate = seconds > 0 && count > 1 ? ` · ${speed.toFixed(speed < 100 ? 1 : 0)} tokens/s` : '';
    return count ? `${count} token${count === 1 ? '' : 's'}${rate}` : '';
  }
}
