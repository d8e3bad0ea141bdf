// Asking the server, and reading what it sends while it draws.

class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

const sentence = (line) => line[0].toUpperCase() + line.slice(1);

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
  try {
    message = sentence((await response.json()).error.message);
  } catch {
    // Something between here and the server has answered.
  }
  throw new ServerError(message, response.status);
}

// Yields { text, finish, tokens } for each chunk; `tokens` is known at the end alone.
async function* stream(path, body, signal) {
  const asked = { ...body, stream: true, stream_options: { include_usage: true } };
  const response = await call(path, { method: 'POST', body: JSON.stringify(asked), signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new ServerError('The connection was lost.', 0);
      const events = (rest + value).split('\n\n');
      rest = events.pop();
      for (const event of events) {
        if (!event.startsWith('data: ')) continue;
        if (event === 'data: [DONE]') return;
        const told = JSON.parse(event.slice(6));
        if (told.error) throw new ServerError(sentence(told.error.message), 200);
        const choice = told.choices[0];
        const text = choice ? choice.delta?.content ?? choice.text ?? '' : '';
        yield { text, finish: choice?.finish_reason, tokens: told.usage?.completion_tokens };
      }
    }
  } catch (error) {
    if (error.name === 'AbortError' || error instanceof ServerError) throw error;
    throw new ServerError('The connection was lost.', 0);
  }
}

// Counts while an answer comes, and says how fast it came.
class Pace {
  constructor() {
    this.chunks = 0;
    this.tokens = 0;
    this.first = 0;
    this.last = 0;
  }

  take(chunk) {
    if (chunk.tokens !== undefined) this.tokens = chunk.tokens;
    if (!chunk.text) return;
    this.last = performance.now();
    this.first ||= this.last;
    this.chunks++;
  }

  get told() {
    const count = this.tokens || this.chunks;
    const seconds = (this.last - this.first) / 1000;
    const speed = (count - 1) / seconds;
    const told = seconds > 0 && count > 1 ? ` · ${speed.toFixed(speed < 100 ? 1 : 0)} tokens/s` : '';
    return count ? `${count} token${count === 1 ? '' : 's'}${told}` : '';
  }
}
