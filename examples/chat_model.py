"""Fine-tunes a model on conversations and asks it a question.

    python -m examples.chat_model runs/mine chats.jsonl --workdir=runs/chat --question='Who are you?'

Each line of the file is one conversation: {"messages": [{"role": "user", "content": "Hi"}, …]}. Only the answers of the
assistant are learned.
"""

from __future__ import annotations

import argparse

import maxlm


def main(argv: list[str] | None = None) -> str:
    """Fine-tunes the model and prints its answer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('base', help='workdir of the base model')
    parser.add_argument('chats', help='file of conversations')
    parser.add_argument('--workdir', default='runs/chat', help='directory of the run (%(default)s)')
    parser.add_argument('--epochs', type=float, default=3, help='passes over the conversations (%(default)g)')
    parser.add_argument('--question', default='Hi', help='question to ask (%(default)r)')
    options = parser.parse_args(argv)

    data = f'{options.workdir}-data'
    config = maxlm.Config.get(
        'finetune', {'data.path': data, 'train.init_from': options.base, 'train.num_epochs': options.epochs}
    )
    maxlm.Dataset.prepare(
        options.chats,
        data,
        format='chat',
        chat_template='chatml',
        tokenizer=f'{options.base}/tokenizer.json',
        pack_seq_len=config.data.seq_len,
    )
    run = maxlm.Trainer(config, workdir=options.workdir).train()
    answer = run.model().chat([{'role': 'user', 'content': options.question}], max_tokens=64, temperature=0.7)
    print(answer)
    return answer


if __name__ == '__main__':
    main()
