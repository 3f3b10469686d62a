"""Each item of the check: what passes, what fails and says how to repeat it, what does not apply."""

from __future__ import annotations

import json
import shlex
import subprocess
from typing import Any

import httpx
import pytest

from entrypoint.tuning import accuracy, check, questions
from entrypoint.tuning.target import Target

CHAT = {"choices": [{"message": {"content": "Hello."}, "finish_reason": "stop"}], "usage": {"completion_tokens": 2}}


class Server:
    """Answers as ``answers`` says: by path, a document or a function of the request's body."""

    def __init__(self, **answers: Any) -> None:
        self.answers = {"chat/completions": CHAT, **answers}

    def target(self, **changed: Any) -> Target:
        http = httpx.Client(base_url="http://box-7:3000", transport=httpx.MockTransport(self.answer))
        known = {"url": "http://box-7:3000", "http": http, "api_key": None, "model": "m", "context": 4096, "plan": None}
        return Target(**{**known, "embedding": False, "sglang": True, "own": False, "info": {}, **changed})

    def answer(self, request: httpx.Request) -> httpx.Response:
        known = self.answers.get(request.url.path.removeprefix("/v1/"))
        if callable(known):
            known = known(json.loads(request.content))
        if isinstance(known, str):
            return httpx.Response(200, text=known)
        return (
            httpx.Response(404, text="box-7:3000 knows no such path")
            if known is None
            else httpx.Response(200, json=known)
        )


def verdicts(target: Target) -> dict[str, tuple[str, str]]:
    return {item["id"]: (item["verdict"], item["detail"]) for item in check.run(target)["items"]}


def said(content: str, **more: Any) -> dict[str, Any]:
    return {
        "choices": [{"message": {"content": content, **more}, "finish_reason": "stop"}],
        "usage": {"completion_tokens": 2},
    }


def test_a_path_that_is_not_there_fails_without_the_servers_name() -> None:
    assert verdicts(Server().target())["messages"] == ("fail", "answers 404: the server knows no such path")


def test_a_stream_must_come_in_pieces_and_end() -> None:
    piece = 'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'

    def streamed(text: str) -> str:
        return verdicts(Server(**{"chat/completions": lambda body: text if body.get("stream") else CHAT}).target())[
            "streaming"
        ][0]

    assert streamed(piece * 3 + "data: [DONE]\n\n") == "pass"
    assert streamed(piece * 3) == "fail"
    assert streamed(piece + "data: [DONE]\n\n") == "fail"


def test_tools_and_thinking_apply_where_the_engine_parses_them() -> None:
    call = {"function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    good = Server(**{"chat/completions": said("42", tool_calls=[call], reasoning_content="hm")})
    parsers = {"tool_call_parser": "glm", "reasoning_parser": "glm"}
    found = verdicts(good.target(info=parsers))
    assert found["tools"][0] == found["thinking"][0] == "pass"
    found = verdicts(
        Server(**{"chat/completions": said("<think>a</think>42", reasoning_content="a")}).target(info=parsers)
    )
    assert found["tools"] == ("fail", "no tool was called")
    assert found["thinking"] == ("fail", "marks of thinking stand in the answer")
    found = verdicts(good.target())
    assert found["tools"][0] == found["thinking"][0] == "not applicable"


def test_structured_output_must_fit_the_schema() -> None:
    assert verdicts(Server(**{"chat/completions": said('{"colour": "red"}')}).target())["structured"][0] == "pass"
    assert verdicts(Server(**{"chat/completions": said('{"colour": "dog"}')}).target())["structured"][0] == "fail"
    assert verdicts(Server(**{"chat/completions": said("red")}).target())["structured"][0] == "fail"


def test_an_embedding_must_not_depend_on_its_batch() -> None:
    def served(alone: list[float]) -> str:
        def vectors(body: dict[str, Any]) -> dict[str, Any]:
            rows = [[1.0, 0.0], [0.0, 1.0]] if isinstance(body["input"], list) else [alone]
            return {"data": [{"embedding": row} for row in rows]}

        found = verdicts(Server(embeddings=vectors).target(embedding=True))
        assert found["chat"][0] == found["accuracy"][0] == "not applicable"
        return found["embeddings"][0]

    assert served([1.0, 0.0]) == "pass"
    assert served([0.6, 0.8]) == "fail"


def test_the_command_of_a_failed_item_sends_the_same_request() -> None:
    def refuse(body: dict[str, Any]) -> Any:
        return {"usage": {"prompt_tokens": 100}} if len(body["prompt"]) < 1000 else None

    items = check.run(Server(completions=refuse).target(api_key="sentinel"))["items"]
    item = next(item for item in items if item["id"] == "long")
    assert item["verdict"] == "fail" and "sentinel" not in item["repeat"] and len(item["repeat"]) < 1000
    made, sent = item["repeat"].split(" | ")
    body = json.loads(subprocess.run(shlex.split(made), capture_output=True, check=True).stdout)
    assert body["prompt"] == check.WORD * int(4096 * check.LONG)
    assert sent.endswith('-d @- -H "Authorization: Bearer $RELAUNCH_API_KEY"')


def test_a_receipt_of_a_check_holds_no_request() -> None:
    kept = check.for_receipt(check.run(Server().target()))
    assert "box-7" not in json.dumps(kept) and "hello" not in json.dumps(kept)


def test_every_question_knows_its_answer() -> None:
    asked = questions.generate(1, 4096)
    assert len(asked) == 100 and asked == questions.generate(1, 4096) != questions.generate(2, 4096)
    assert all(question.is_right(f"The answer is: {question.answer}.") for question in asked)
    assert not any(question.is_right("no idea") for question in asked)
    for question in (q for q in asked if q.kind == "arithmetic"):
        a, sign, b = question.text.removeprefix("What is ").split("?")[0].split(" ")
        assert int(question.answer) == (int(a) + int(b) if sign == "+" else int(a) * int(b))


def test_what_is_to_be_found_stands_at_every_depth() -> None:
    lines = [q.text.split("\n") for q in questions.generate(1, None) if q.kind == "extraction"]
    depths = {round([line.startswith("The code") for line in text].index(True) / (len(text) - 3), 1) for text in lines}
    assert {0.0, 0.5, 1.0} <= depths and len(depths) == 5


@pytest.mark.parametrize(("right", "verdict"), [(100, "pass"), (90, "pass"), (89, "fail")])
def test_the_accuracy_item_counts(right: int, verdict: str) -> None:
    known = {q.text: q.answer for q in questions.generate(check.SEED, 4096)[:right]}
    server = Server(**{"chat/completions": lambda body: said(known.get(body["messages"][0]["content"], "?"))})
    assert verdicts(server.target())["accuracy"][0] == verdict
    assert verdicts(server.target(info={"load_format": "dummy"}))["accuracy"][0] == "not applicable"


def test_a_few_lost_answers_are_chance_and_many_are_not() -> None:
    asked = questions.generate(1, 4096)
    good = [question.answer for question in asked]
    assert accuracy.lost(asked, good, ["?"] * 4 + good[4:]) is None
    assert accuracy.lost(asked, good, ["?"] * 5 + good[5:]) == "95 of 100 questions right, 100 before"
    assert accuracy.lost(asked, ["?"] * 100, [""] * 100) == "100 more empty answers than before"
