"""What redaction takes out, what it must leave, that no text can make it slow, and that no key reaches a store or a file."""

import json
import random
import re
import string
import threading
from dataclasses import replace

import pytest

from mappa_graph.errors import ConfigError
from mappa_graph.exchange.redact import RULES, Redactor, Rule, redactor
from mappa_graph.exchange.secrets import luhn
from mappa_graph.record import Call, Episode, EpisodeTrace, Execution, ExecutionErrorInfo, Failure, Transition, Verdict
from mappa_graph.store import TraceStore
from tests.fakes.exported import episode

LETTERS = string.ascii_letters + string.digits


def made(prefix, length, alphabet=LETTERS, seed=7):
    """A key of the provider's shape that was never anybody's."""
    rng = random.Random(seed)
    return prefix + "".join(rng.choice(alphabet) for _ in range(length - 2)) + "a1"


HEX = "0123456789abcdef"
KEYS = [
    made("sk-proj-", 48), made("sk-", 48), made("sk-ant-api03-", 80), made("sk-or-v1-", 64, HEX), made("sk-lf-", 36, HEX + "-"),
    "AKIA" + made("", 16, string.ascii_uppercase + string.digits).upper(), "ASIA" + made("", 16, string.ascii_uppercase).upper(),
    made("ghp_", 36), made("gho_", 36), made("github_pat_", 60), made("glpat-", 20), made("xoxb-123456789012-", 24), made("AIza", 35),
    made("ya29.", 60), made("GOCSPX-", 28), made("hf_", 34), made("lsv2_pt_", 32, HEX)[:40] + "_" + "0123456789", made("gsk_", 52),
    made("xai-", 60), made("pplx-", 48), made("nvapi-", 60), made("sk_live_", 24), made("SG.", 22) + "." + made("", 43), made("npm_", 36),
    made("dapi", 32, HEX), made("hvs.", 24), "eyJhbGciOiJIUzI1NiJ9." + made("eyJ", 40) + "." + made("", 43),
]  # fmt: skip


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key[:9])
@pytest.mark.parametrize(
    "around", ["{}", "use {} now", 'OPENAI_API_KEY="{}"', "Authorization: Bearer {}", "({}),", '{{\\"k\\": \\"{}\\"}}']
)
def test_keys_of_providers_are_taken_out_whole(key, around):
    text = around.format(key)
    clean = Redactor().text(text)
    assert clean == around.format("[KEY]")


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("postgres://ann:p4ss-w0rd@db/x", "postgres://ann:[KEY]@db/x"),
        ("Authorization: Basic dXNlcjpwYXNzd29yZA==", "Authorization: Basic [KEY]"),
        ("aws_secret_access_key = wJalrXUtnFEMIK7MDENGbPxRfiCYzzzzKEY1", "aws_secret_access_key = [KEY]"),
        ("password: hunter22", "password: [KEY]"),
        ('{"client_secret": "Zm9vYmFyYmF6cXV4MTIz"}', '{"client_secret": "[KEY]"}'),
        ("https://x.org/v1?api_key=abcdef0123456789abcd&q=1", "https://x.org/v1?api_key=[KEY]&q=1"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIabc/+=\nxyz\n-----END RSA PRIVATE KEY----- ok", "[KEY] ok"),
        ("cut off: -----BEGIN PRIVATE KEY-----\nMIIEvQ", "cut off: [KEY]"),
        (r'"-----BEGIN PRIVATE KEY-----\nMIIab\n-----END PRIVATE KEY-----\n"', r'"[KEY]\n"'),
    ],
)
def test_secrets_are_known_by_what_stands_around_them(text, clean):
    assert Redactor().text(text) == clean


LONE = "abcdefghijklmnopqrstuvwxyzabcdefgh"


@pytest.mark.parametrize(
    ("record", "clean"),
    [
        ({"token": "abc123def456ghi7"}, {"token": "[KEY]"}),
        ({"secret": "tok_live_abc123"}, {"secret": "[KEY]"}),
        ({"api_token": "anything"}, {"api_token": "[KEY]"}),
        ({"openaiApiKey": "anything"}, {"openaiApiKey": "[KEY]"}),
        ({"MY_SERVICE_API_KEY": "anything"}, {"MY_SERVICE_API_KEY": "[KEY]"}),
        ({"password": ["hunter22", {"old": "hunter21"}]}, {"password": ["[KEY]", {"old": "[KEY]"}]}),
        ({"credentials": {"password": 12345678}}, {"credentials": {"password": "[KEY]"}}),
        ({"apiKey": {"value": "hunter22"}}, {"apiKey": {"value": "[KEY]"}}),
        ([{"name": "x-api-key", "value": "anything"}], [{"name": "x-api-key", "value": "[KEY]"}]),
        ([{"key": "Authorization", "value": "Basic zzz"}], [{"key": "Authorization", "value": "[KEY]"}]),
    ],
)
def test_fields_named_for_secrets_are_emptied_whatever_they_hold(record, clean):
    assert Redactor()({"input": record}) == {"input": clean}
    assert Redactor()({"input": clean}) == {"input": clean}


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        (f"key_{KEYS[0]}", "key_[KEY]"),
        (f"my-{KEYS[1]} x", "my-[KEY] x"),
        (f"KEY{KEYS[0]}", "KEY[KEY]"),
        (f"prod{KEYS[2]}", "prod[KEY]"),
        (f"Authorization: Bearer {LONE[:20]}", "Authorization: Bearer [KEY]"),
        ("use bearer aBcDeFxYzQwErTyUiOpAsDfGh now", "use bearer [KEY] now"),
        ('api_token="abcdef0123456789"', 'api_token="[KEY]"'),
    ],
)
def test_keys_are_found_behind_what_they_are_glued_to(text, clean):
    assert Redactor().text(text) == clean


@pytest.mark.parametrize(
    "record",
    [
        {"logprobs": [{"token": " responsibilities", "logprob": -0.5}, {"token": "12345678901234", "logprob": -1}]},
        {"token": 12345678, "tokens": [12345678], "total_tokens": 123456, "secret": "the butler did it", "password": 0, "cookie": True},
        {"properties": {"password": {"type": "string", "description": "the password of the user"}}, "required": ["password"]},
        {"properties": {"api_key": {"anyOf": [{"type": "string"}, {"type": "null"}], "title": "Your api key"}}},
        {"name": "add", "value": "anything at all"}, {"key": "user_score", "value": "good"},
        "task-550e8400-e29b-41d4-a716-446655440000 and disk-0a1b2c3d4e5f6a7b8c9d0e and risk-assessment-of-2024-and-2025",
        "bearer authenticationHandlerFactoryOfRequests and Authorization: Bearer your_access_token_here",
        "task-sk-fading-circle-wrap-small",
    ],
)  # fmt: skip
def test_fields_and_words_that_only_look_like_secrets_stay(record):
    assert Redactor()({"input": record}) == {"input": record}


HARMLESS = [
    "3.14159265358979323846 and 2^64 = 18446744073709551616", "x = [1, 2, 3]; y = x[::2] + x[1::3]", "12/25/2024 at 10:30:45, 2024-12-25",
    "415 - 555 = -140, 415-555 = -140, (415 + 555) * 2671 = 2590870", "1,234,567.89 + 1 234 567 = ?", "x +14155552671 and 5 + 12345678901",
    "f(x) = 4x^3 + 2x - 7, so f(4111) = 277865324499", "4111111111111112", "0.4111111111111111", "1234567812345670123456",
    "A@B.T and x@w.transpose(0, 1) and (a @ b).sum()", "q@k.mT / math.sqrt(64)", "@dataclass\nclass A:\n    x: int = 0",
    "git clone git@github.com:org/repo.git", "logo@2x.png", "pip install torch==2.6.0 numpy>=1.26.4", "lodash@4.17.21",
    "sk-fading-circle-loader-wrap-small", "task-sk-1234", "the token count is 12345678901234567890", "tokens = tokenizer.encode(text)",
    "api_key = os.environ['OPENAI_API_KEY']", "api_key=settings.openai_api_key_2", "password = getpass.getpass()", "password=None",
    "llm = ChatOpenAI(api_key=api_key, model=model)", 'api_key="YOUR_API_KEY_GOES_HERE_1"', "secret_key: ${SECRET_KEY_1}",
    "bearer of responsibilities-and-more-than-one", "hash 550e8400-e29b-41d4-a716-446655440000", "sha256 " + "a3" * 32,
    "std::vector<int> v; a::b::c; ::1", "ISBN 978-3-16-148410-0", "lines 100-200, pages 415-555", "7 + 8 = 15 (see eq. 12.34.56)",
    "matrix [[415, 555, 2671], [4111, 1111, 1111]]", "[KEY] [EMAIL] [PHONE] [CARD] [IP]", "phone = models.CharField(max_length=20)",
    "tel aviv 2024 and cell 1234", "+1 +2 +3 +4 +5 +6 +7 +8 +9", "1e-10 +1.5e+10", "PWD=/home/ann/project_2", "password: required.",
    "cell 1234567 of column 89", "access_token = create_access_token(data={'sub': user})",
    "private_key = rsa.generate_private_key(public_exponent=65537)", "f'{x:+012345678.2f}'",
]  # fmt: skip


@pytest.mark.parametrize("text", HARMLESS)
def test_sums_and_code_are_left_alone(text):
    assert Redactor(["email", "phone", "card", "ip"]).text(text) == text


@pytest.mark.parametrize(
    ("rule", "text", "clean"),
    [
        ("email", "write to Ann.Lee+x@mail.example.co.uk, or bob@x.org.", "write to [EMAIL], or [EMAIL]."),
        ("email", "<a href='mailto:ann@example.com'>", "<a href='mailto:[EMAIL]'>"),
        ("phone", "call +1 415 555 2671 or +49 30 901820, (415) 555-2671", "call [PHONE] or [PHONE], [PHONE]"),
        ("phone", "+33 6 12 34 56 78; tel: 020 7946 0958; Phone number: 06 12 34 56 78", "[PHONE]; tel: [PHONE]; Phone number: [PHONE]"),
        ("card", "4111 1111 1111 1111, 5500-0000-0000-0004, 340000000000009", "[CARD], [CARD], [CARD]"),
        ("ip", "from 10.1.2.3 to 2001:db8::8a2e:370:7334, not 127.0.0.1", "from [IP] to [IP], not 127.0.0.1"),
    ],
)
def test_each_rule_finds_its_kind(rule, text, clean):
    assert Redactor([rule]).text(text) == clean
    assert Redactor().text(text) == text


def test_a_redacted_record_stays_as_it_is():
    once = redactor("all").text("ann@x.org +1 415 555 2671 10.2.3.4 4111111111111111 password=hunter22 " + KEYS[0])
    assert redactor("all").text(once) == once
    assert once == "[EMAIL] [PHONE] [IP] [CARD] password=[KEY] [KEY]"


def test_every_text_of_a_record_is_looked_at_and_the_record_is_not_changed():
    record = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "ann@x.org"}], "tool_calls": ({"args": {"to": "ann@x.org"}},)}],
        "n": 3, "none": None, "flag": True, "ann@x.org": {"bob@x.org": 1}, "headers": {"X-Api-Key": "anything-at-all", "password": ""},
    }  # fmt: skip
    before = json.dumps(record)
    clean = Redactor(["email"])(record)
    assert clean == {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "[EMAIL]"}], "tool_calls": [{"args": {"to": "[EMAIL]"}}]}],
        "n": 3, "none": None, "flag": True, "ann@x.org": {"[EMAIL]": 1}, "headers": {"X-Api-Key": "[KEY]", "password": ""},
    } or clean["[EMAIL]"] == {"[EMAIL]": 1}  # fmt: skip
    assert json.dumps(record) == before
    assert "@" not in json.dumps({k: v for k, v in clean.items() if k != "ann@x.org"})


def test_names_that_become_the_same_keep_their_values():
    assert Redactor(["email"])({"input": {"a@x.org": 1, "b@x.org": 2}}) == {"input": {"[EMAIL]": 1, "[EMAIL] 2": 2}}


def test_ids_that_join_records_stay_and_those_in_an_apps_own_data_do_not():
    rules = Redactor(["phone"], patterns={"number": "[0-9]{6}"})
    record = {"actions": [{"id": "run-123456", "messages": [{"tool_call_id": "call-123456"}]}], "input": {"id": "123456", "x": "123456"}}
    assert rules(record) == {
        "actions": [{"id": "run-123456", "messages": [{"tool_call_id": "call-123456"}]}],
        "input": {"id": "[NUMBER]", "x": "[NUMBER]"},
    }
    assert rules({"id": KEYS[0]}) == {"id": "[KEY]"}


def test_finds_are_counted_by_rule_from_several_threads():
    rules = Redactor(["email"])
    threads = [threading.Thread(target=lambda: [rules(["a@x.org", KEYS[0], "b@x.org"]) for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rules.counts == {"email": 400, "keys": 200}


def test_data_nested_deeper_than_python_recurses_is_redacted():
    deep = "ann@x.org"
    for _ in range(5000):
        deep = [deep]
    clean = Redactor(["email"])(deep)
    for _ in range(5000):
        clean = clean[0]
    assert clean == "[EMAIL]"


def test_a_users_patterns_have_names_and_are_described():
    rules = redactor("email", ["customer=cust-[0-9]{6}", r"ward=(?i)ward \d+"])
    assert rules.text("CUST cust-123456 in Ward 7, ann@x.org, \ud800 cust-654321") == "CUST [CUSTOMER] in [WARD], [EMAIL], ? [CUSTOMER]"
    described = {rule["rule"]: rule for rule in rules.describe()}
    assert list(described) == ["keys", "customer", "ward", "email"]
    assert described["customer"]["pattern"] == "cust-[0-9]{6}"
    assert rules.counts["customer"] == 2


@pytest.mark.parametrize(
    ("rules", "patterns", "said"),
    [
        ("emails", [], "no redaction rule 'emails'"),
        ("", ["cust-[0-9]+"], "has no name"),
        ("", ["a=x", "a=y"], "two patterns named"),
        ("", ["A b=x"], "can't be the name"),
        ("", ["email=x"], "name of a built-in rule"),
        ("", ["a=(?<=x)y"], "RE2"),
        ("", [r"a=(x)\1"], "RE2"),
        ("", ["a=["], "can't be used"),
        ("", ["a=x*"], "matches nothing"),
        ("", ["a=" + "x" * 1001], "more than 1000"),
    ],
)
def test_rules_that_cant_be_run_are_refused(rules, patterns, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        redactor(rules, patterns)


def test_a_rule_of_ones_own_takes_part():
    shout = Rule("shout", "[LOUD]", "capital words", lambda text: (text.replace("HELP", "[LOUD]"), text.count("HELP")))
    rules = Redactor([shout])
    assert (rules.text("HELP me"), rules.counts["shout"]) == ("[LOUD] me", 1)


HOSTILE = [
    "a" * 64, "@", "eyJ", "sk-", "+1 ", "-----BEGIN PRIVATE KEY-----", "-----BEGIN PRIVATE KEY-----abc-----END ", "1", "1 ", "api_key=", "://:",
    "://a:b",
    "bearer ", "password: ", "a.", "x@a.", "::", "tel 1 1 1 ", "415-", "4111 ", "10.", "ghp_", "AccountKey=", "x@" + "a-" * 30 + ".",
]  # fmt: skip


@pytest.mark.timeout(60)
@pytest.mark.parametrize("piece", HOSTILE, ids=range(len(HOSTILE)))
def test_no_text_makes_a_rule_slow(piece):
    """A megabyte takes a fraction of a second; a rule that takes quadratic time on it would run into the timeout."""
    rules = Redactor(RULES, patterns={"evil": "(a+)+$|([a-zA-Z]+)*!"})
    text = (piece * (1_000_000 // len(piece) + 1))[:1_000_000] + " <ann@x.org>"
    assert Redactor._run(text, rules.rules)[0].endswith("<[EMAIL]>")


def test_luhn_is_the_cards_check():
    assert luhn("79927398713")
    assert not luhn("79927398710")


@pytest.mark.parametrize("key", [KEYS[0], KEYS[5], KEYS[7], KEYS[-1]], ids=lambda key: key[:6])
def test_a_key_never_reaches_a_store_that_redacts(tmp_path, key):
    trace = episode(1, 0, text=f"I found {key} in the file")
    solved, wrote = trace.actions
    leaky = replace(
        solved,
        messages=[{"role": "user", "content": f"my key is {key}"}],
        tool_calls=[{"id": "u", "type": "function", "function": {"name": "run", "arguments": json.dumps({"code": f"connect('{key}')"})}}],
        executions=(
            Execution("x", "error", code=f"k='{key}'", stdout=f"{key}\n", stderr=key, error=ExecutionErrorInfo("E", f"bad {key}", key)),
        ),
        error=f"AuthError: {key}",
    )
    call = trace.calls[solved.id]
    call = replace(
        call, text=leaky.output, messages=leaky.messages, tool_calls=leaky.tool_calls, sampling={"extra_headers": {"x-api-key": key}}
    )
    leaky_trace = EpisodeTrace(
        replace(trace.episode, task=f"use {key}", error=f"failed with {key}", thread_id=f"thread {key}"),
        (Transition("t", "n", "n", 0, input={"config": {"env": {"K": key}, key: 1}}, output=[key], error=key),),
        (leaky, wrote), (), {solved.id: Verdict(3.0, f"it printed {key}", better_action=f"not {key}", coach="c")},
    )  # fmt: skip
    with TraceStore(tmp_path / "trace.db", redact=Redactor()) as store:
        store.add_call(call)
        store.save_episode(leaky_trace)
        store.add_verdict(trace.episode.id, wrote.id, Verdict(None, error=f"coach failed: {key}"))
        store.add_failure(Failure("gateway", "AuthError", f"401 for {key}"))
        kept = store.episode(trace.episode.id)
    whole = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert key.encode() not in whole
    assert key not in str(kept)
    assert str(kept).count("[KEY]") >= 12
    assert kept.calls[solved.id].prompt_ids == ()  # tokens would spell it out
    assert kept.actions[0].id == solved.id


def test_a_call_without_secrets_keeps_its_tokens(tmp_path):
    call = Call("c", "p", 0, (1, 2), (3,), (-0.5,), "stop", "It is 415-555.", messages=({"role": "user", "content": "2 + 2"},))
    with TraceStore(tmp_path / "trace.db", redact=redactor("all")) as store:
        store.add_call(call)
        assert store.call("c").prompt_ids == (1, 2)
        store.save_episode(EpisodeTrace(Episode("e", task="x")))
