"""Environments written against the classes of verifiers, for tests with the package or with a stand-in."""

ROWS = [{'question': f'Say {letter}.', 'answer': letter} for letter in 'ab']


def single_turn(vf, dataset):
    """Returns a SingleTurnEnv whose reward is 1 for the answer."""

    def exact(completion, answer, **_):
        return float(content_of(completion[-1]) == answer)

    def length(completion, **_):
        return float(len(content_of(completion[-1])))

    rubric = vf.Rubric(funcs=[exact, length], weights=[1.0, 0.0])
    return vf.SingleTurnEnv(dataset=dataset(ROWS), rubric=rubric)


def multi_turn(vf, dataset):
    """Returns a MultiTurnEnv that answers each turn with its number, and ends after the third turn."""

    class Counting(vf.MultiTurnEnv):
        async def env_response(self, messages, state, **_):
            count = len(state['trajectory'])
            if content_of(messages[-1]) == 'fail':
                raise RuntimeError('no network')
            return [{'role': 'user', 'content': f'turn {count}'}]

    def turns(state, **_):
        return float(len(state['trajectory']))

    return Counting(dataset=dataset(ROWS), rubric=vf.Rubric(funcs=[turns]), max_turns=3)


def tools(vf, dataset):
    """Returns a ToolEnv with one tool."""

    def add(a: int, b: int) -> int:
        """Adds two numbers.

        Args:
            a: first number.
            b: second number.
        """
        return a + b

    def solved(completion, **_):
        return float('3' in content_of(completion[-1]))

    return vf.ToolEnv(dataset=dataset(ROWS), rubric=vf.Rubric(funcs=[solved]), tools=[add], max_turns=4)


def content_of(message):
    """Returns the content of a message, a dict or a Pydantic model."""
    return message['content'] if isinstance(message, dict) else message.content
