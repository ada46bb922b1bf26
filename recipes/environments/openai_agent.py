"""An agent that multiplies by a tool, with the openai SDK alone: nothing of AsyncFlow is in it."""

import json

from openai import AsyncOpenAI

TOOL = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "The value of a op b, where op is one of + - * /.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "number"}, "op": {"type": "string"}, "b": {"type": "number"}},
            "required": ["a", "op", "b"],
        },
    },
}
OPERATIONS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "/": lambda a, b: a / b}


async def run(example: dict, base_url: str, api_key: str) -> float:
    """Ask until there is an answer without a call. 1.0 where it has the right number."""
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    messages = [{"role": "user", "content": example["prompt"]}]
    for _ in range(3):
        reply = await client.chat.completions.create(model="policy", messages=messages, tools=[TOOL], max_tokens=256)
        said = reply.choices[0].message
        messages.append(said.model_dump(exclude_none=True))
        for call in said.tool_calls or ():
            try:
                given = json.loads(call.function.arguments)
                result = str(OPERATIONS[given["op"]](given["a"], given["b"]))
            except (KeyError, TypeError, ZeroDivisionError) as error:
                result = f"Error: {error}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if not said.tool_calls:
            break
    return float(example["answer"] in (said.content or ""))
