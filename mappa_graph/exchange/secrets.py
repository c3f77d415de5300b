"""Where secrets and personal data lie in a text: one function a kind, `(text) -> spans`, each in linear time.

A find must be worth its damage: a number in a sum or a dotted name in code that becomes a placeholder spoils training data, so each kind
asks for more than a shape: a provider's prefix, a known issuer and a check digit, a label, or how the text goes on. Every regular
expression here has bounded or possessive repeats (`++`, `{m,n}+`), and is only run where one of its literal parts is in the text.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

Spans = list[tuple[int, int]]

# --- keys ------------------------------------------------------------------------------------------------------------------

_W = r"(?<![A-Za-z0-9])"
_KEYS: tuple[tuple[tuple[str, ...], re.Pattern[str]], ...] = tuple(
    (anchors, re.compile(_W + pattern))
    for anchors, pattern in (
        (("AKIA", "ASIA", "AGPA", "AIDA", "AROA", "AIPA", "ANPA", "ANVA", "ABIA", "ACCA"),
         r"A(?:KIA|SIA|GPA|IDA|ROA|IPA|NPA|NVA|BIA|CCA)[A-Z0-9]{16}(?![A-Za-z0-9])"),
        (("ghp_", "gho_", "ghu_", "ghs_", "ghr_"), r"gh[pousr]_[A-Za-z0-9]{30,}+"),
        (("github_pat_",), r"github_pat_[A-Za-z0-9_]{22,}+"),
        (("glpat-", "gldt-", "glrt-"), r"gl(?:pat|dt|rt)-[A-Za-z0-9_\-]{20,}+"),
        (("xox", "xapp-"), r"(?:xox[abeoprs]|xapp)-[A-Za-z0-9\-]{10,}+"),
        (("hooks.slack.com/",), r"hooks\.slack\.com/(?:services|workflows|triggers)/[A-Za-z0-9/]{20,}+"),
        (("discord.com/api/webhooks/", "discordapp.com/api/webhooks/"), r"discord(?:app)?\.com/api/webhooks/[0-9]{10,30}/[\w\-]{20,}+"),
        (("AIza",), r"AIza[A-Za-z0-9_\-]{35}"),
        (("ya29.",), r"ya29\.[A-Za-z0-9_\-]{20,}+"),
        (("GOCSPX-",), r"GOCSPX-[A-Za-z0-9_\-]{20,}+"),
        (("hf_", "api_org_"), r"(?:hf|api_org)_[A-Za-z0-9]{30,}+"),
        (("lsv2_", "ls__"), r"(?:lsv2_[a-z]{2}_[0-9a-f]{32}_[0-9a-f]{8,12}|ls__[0-9a-f]{32})"),
        (("gsk_",), r"gsk_[A-Za-z0-9]{20,}+"),
        (("xai-",), r"xai-[A-Za-z0-9]{20,}+"),
        (("pplx-",), r"pplx-[A-Za-z0-9]{20,}+"),
        (("r8_",), r"r8_[A-Za-z0-9]{30,}+"),
        (("nvapi-",), r"nvapi-[A-Za-z0-9_\-]{20,}+"),
        (("tvly-",), r"tvly-[A-Za-z0-9\-]{16,}+"),
        (("k_live_", "k_test_"), r"[spr]k_(?:live|test)_[A-Za-z0-9]{16,}+"),
        (("whsec_",), r"whsec_[A-Za-z0-9+/=]{20,}+"),
        (("SG.",), r"SG\.[A-Za-z0-9_\-]{16,32}\.[A-Za-z0-9_\-]{16,}+"),
        (("npm_",), r"npm_[A-Za-z0-9]{36}"),
        (("pypi-AgE",), r"pypi-AgE[A-Za-z0-9_\-]{30,}+"),
        (("SK",), r"SK[0-9a-f]{32}(?![A-Za-z0-9])"),
        (("dop_v1_", "doo_v1_", "dor_v1_"), r"do[por]_v1_[0-9a-f]{64}"),
        (("dapi",), r"dapi[0-9a-f]{32}(?![A-Za-z0-9])"),
        (("hvs.", "hvb."), r"hv[sb]\.[A-Za-z0-9_\-]{20,}+"),
        (("shpat_", "shpca_", "shppa_", "shpss_"), r"shp(?:at|ca|pa|ss)_[0-9a-fA-F]{32}"),
        (("lin_api_",), r"lin_api_[A-Za-z0-9]{30,}+"),
        (("ntn_",), r"ntn_[A-Za-z0-9]{30,}+"),
        ((":AA",), r"[0-9]{8,10}:AA[A-Za-z0-9_\-]{33}"),
        (("AccountKey=", "SharedAccessKey="), r"(?:Account|SharedAccess)Key=[A-Za-z0-9+/=]{40,}+"),
        (("eyJ",), r"(?<![\-_])eyJ[A-Za-z0-9_\-]{8,}+\.eyJ[A-Za-z0-9_\-]{8,}+\.[A-Za-z0-9_\-]*+"),
    )
)  # fmt: skip
_MARKS = ("_", "-", ".", "=", ":", "A", "")


def _marked(mark: str) -> tuple[tuple[str, re.Pattern[str]], ...]:
    return tuple((a, p) for anchors, p in _KEYS for a in anchors if next(m for m in _MARKS if m in a) == mark)


_ANCHORED = tuple((mark, _marked(mark)) for mark in _MARKS)
"""By a character that all of a group's literals have, and that many texts have not."""
_SK = re.compile(r"sk-[A-Za-z0-9_\-]{20,}+")
_SK_KINDS = ("sk-proj-", "sk-ant-", "sk-or-v1-", "sk-lf-", "sk-svcacct-", "sk-admin-")
_BEFORE_SK = re.compile(r"(?:^|[^A-Za-z0-9])([A-Za-z0-9]{1,16})$")
_WORDS = re.compile(r"(?:[a-z]++|[A-Z]++|[A-Z]?[a-z]++|[0-9]{1,3})")
_BEARER = re.compile(
    r"(?i)(?<![a-z0-9])(?:bearer|authorization[\"']?[ \t]{0,4}[:=][ \t]{0,4}[\"']?(?:basic|token))[ \t]{1,4}([A-Za-z0-9._~+/\-]{16,}+=*+)"
)
_BEARER_HEADER = re.compile(
    r"(?i)authorization\\{0,2}[\"']?[ \t]{0,4}[:=][ \t]{0,4}\\{0,2}[\"']?bearer[ \t]{1,4}([A-Za-z]{16,}+)(?![A-Za-z0-9._~+/\-])"
)
_BEARER_LETTERS = re.compile(r"(?i)(?<![a-z0-9])bearer[ \t]{1,4}([A-Za-z]{24,}+)(?![A-Za-z0-9._~+/\-])")
_URL_PASSWORD = re.compile(r"://[^\s/:@\"'<>]{0,256}:([^\s/@\"'<>\[\]]{1,256}+)@")
_ASSIGNED = re.compile(
    r"(?i)(?:(api[_-]?key|secret[_-]?key|access[_-]?key(?:[_-]?id)?|access[_-]?token|auth[_-]?token|api[_-]?token|refresh[_-]?token|bot[_-]?token|"
    r"client[_-]?secret|app[_-]?secret|webhook[_-]?secret|signing[_-]?secret|private[_-]?key|account[_-]?key)|"
    r"(passw(?:or)?d|passphrase|pwd))"
    r"\\{0,2}[\"']?[ \t]{0,8}(?:=>|[:=])[ \t]{0,8}(\\{0,2}[\"'])?([^\s\"'`,;&<>\[\](){}\\]{8,512}+)"
)
_ASSIGNED_ANCHORS = ("key", "secret", "token", "passw", "passphrase", "pwd")
_DOTTED = re.compile(r"[A-Za-z_]\w*+(?:\.[A-Za-z_]\w*+)*+")
_PEM = re.compile(r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----")
_PEM_BODY = re.compile(r"(?:[A-Za-z0-9+/=:,\-. \t\r\n]|\\[nrt])*+")

SECRET_FIELDS = frozenset(
    {"api_key", "apikey", "x_api_key", "secret_key", "secretkey", "access_key", "accesskey", "secret_access_key", "secretaccesskey",
     "aws_secret_access_key", "access_token", "accesstoken", "refresh_token", "refreshtoken", "auth_token", "authtoken", "id_token",
     "client_secret", "clientsecret", "private_key", "privatekey", "password", "passwd", "passphrase", "authorization",
     "proxy_authorization", "cookie", "set_cookie", "openai_api_key", "anthropic_api_key", "langsmith_api_key", "session_token"}
)  # fmt: skip
"""Names of fields whose text is a secret whatever it looks like; - and _ are the same, and so are camelCase and snake_case."""
_SECRET_ENDS = ("api_key", "apikey", "secret_key", "access_key", "access_token", "refresh_token", "auth_token", "api_token", "apitoken",
                "bot_token", "client_secret", "app_secret", "api_secret", "signing_secret", "webhook_secret", "private_key")  # fmt: skip
_MAYBE_FIELDS = frozenset({"token", "secret", "pwd", "bearer", "bearer_token"})
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_LONGEST_FIELD = 80


def field_level(name: object) -> int:
    """What a field's name says of its content: 2 = a secret, 1 = one where it looks like one (`token` may be a word), 0 = nothing."""
    return _level(name) if isinstance(name, str) and 3 <= len(name) <= _LONGEST_FIELD else 0


@lru_cache(4096)
def _level(name: str) -> int:
    plain = _HUMP.sub("_", name).lower().replace("-", "_")
    if plain in SECRET_FIELDS or plain.replace("_", "") in SECRET_FIELDS:
        return 2
    if plain.endswith(_SECRET_ENDS):
        return 2
    return 1 if plain in _MAYBE_FIELDS or plain.endswith(("_password", "_secret")) else 0


def is_secret(level: int, value: str) -> bool:
    """Whether the text of a field of that level is a secret: not an empty text, nor the words or the one word of something else."""
    if level == 2:
        return len(value) >= 6
    if level == 0 or len(value) < 8 or any(c.isspace() for c in value) or value[0] in "$%<{/":
        return False
    return (len(value) >= 12 and _mixed(value)) or (len(value) >= 24 and value.isalnum())


def key_spans(text: str) -> Spans:
    """API keys, tokens, private keys and passwords."""
    found: Spans = []
    for mark, group in _ANCHORED:
        if mark in text:
            for anchor, pattern in group:
                if anchor in text:
                    found += (match.span() for match in pattern.finditer(text))
    if "sk-" in text:
        found += (match.span() for match in _SK.finditer(text) if _is_sk(match, text))
    if "-----BEGIN " in text:
        found += _pem(text)
    if "://" in text and "@" in text:
        found += (match.span(1) for match in _URL_PASSWORD.finditer(text))
    lower = text.lower()
    if "bearer" in lower or "authorization" in lower:
        found += (match.span(1) for match in _BEARER.finditer(text) if _mixed(match.group(1)) and not _is_code(match.group(1)))
        found += (match.span(1) for match in _BEARER_HEADER.finditer(text) if not match.group(1).upper().startswith(("YOUR", "EXAMPLE")))
        found += (match.span(1) for match in _BEARER_LETTERS.finditer(text) if _restless(match.group(1)))
    for anchor in _ASSIGNED_ANCHORS:
        if anchor in lower:
            found += (match.span(4) for match in _ASSIGNED.finditer(text) if _assigned(match))
            break
    return found


def _is_words(key: str) -> bool:
    """Whether what looks like a key is a name of a style sheet or a slug: words and small numbers with hyphens between."""
    return all(part == "" or _WORDS.fullmatch(part) for part in re.split("[-_]", key)) and max(map(len, re.split("[-_]", key))) < 20


def _is_sk(match: re.Match[str], text: str) -> bool:
    """Whether `sk-...` is a key; what stands right before it (`key_sk-`, `KEYsk-`, but also `task-`, `disk-`) asks for more."""
    key, start = match.group(), match.start()
    if _is_words(key):
        return False
    before = text[start - 1 : start]
    if not (before.isascii() and (before.isalnum() or before in ("_", "-"))):
        return True
    parts = [part for part in re.split("[-_]", key) if len(part) >= 16]
    if before in ("_", "-"):
        return any(map(_mixed, parts))
    glued = _BEFORE_SK.search(text[max(0, start - 17) : start])
    if glued is None:
        return False  # in the midst of base64
    if glued.group(1).lower().endswith(("key", "token", "bearer", "secret")) or key.startswith(_SK_KINDS):
        return any(map(_mixed, parts))
    return any(_mixed(part) and part.lower() != part != part.upper() for part in parts)


def _restless(letters: str) -> bool:
    """Whether letters change between upper and lower case as those of a random word do, and those of a camelCase name don't."""
    return sum(a.isupper() != b.isupper() for a, b in pairwise(letters)) > 0.4 * len(letters)


def _mixed(value: str) -> bool:
    return any(c.isdigit() for c in value) and any(c.isalpha() for c in value)


def _assigned(match: re.Match[str]) -> bool:
    """Whether what is assigned to a secret's name is a literal secret, not code or a stand-in."""
    _, password, quote, value = match.groups()
    if value[0] in "$%*." or len(set(value)) < 4:
        return False
    if not quote and _is_code(value):
        return False
    if password:
        return value[0] not in "/~" and any(not c.isalpha() for c in value.rstrip(".!?:"))
    if not quote and _DOTTED.fullmatch(value) and not _scrambled(value):
        return False
    return len(value) >= 16 and _mixed(value) and not value.upper().startswith(("YOUR", "MY_", "EXAMPLE", "<"))


def _is_code(value: str) -> bool:
    """Whether an unquoted value is a name: `settings.api_key_2`, `my_password1`."""
    return bool(_DOTTED.fullmatch(value)) and ("." in value or "_" in value) and not any(map(_scrambled, value.split(".")))


def _scrambled(value: str) -> bool:
    """Whether an unquoted word is a random one: both cases and digits, or long and with many digits."""
    digits = sum(c.isdigit() for c in value)
    mixed = any(c.isupper() for c in value) and any(c.islower() for c in value) and digits >= 2
    return "_" not in value and (mixed or (len(value) >= 16 and digits >= 4))


def _pem(text: str) -> Spans:
    spans: Spans = []
    begins = list(_PEM.finditer(text))
    end = 0
    for match, following in zip(begins, [*(m.start() for m in begins[1:]), len(text)], strict=True):
        if 0 <= end < match.end():
            end = text.find("-----END ", match.end())
        if 0 <= end < following:
            close = text.find("-----", end + 9, end + 80)
            stop = close + 5 if close >= 0 else end + 9
        else:
            # Cut off: the key goes as far as its letters do.
            body = _PEM_BODY.match(text, match.end(), following)
            stop = body.end() if body else match.end()
        spans.append((match.start(), stop))
    return spans


# --- personal data -----------------------------------------------------------------------------------------------------------

_EMAIL = re.compile(
    r"(?<![A-Za-z0-9._%+\-])[A-Za-z0-9_%+][A-Za-z0-9._%+\-]{0,63}+@((?:[A-Za-z0-9](?:[A-Za-z0-9\-]{0,62})\.){1,8})"
    r"([A-Za-z]{2,24}+)(?![A-Za-z0-9_\-(\[@])(?!\.[A-Za-z0-9_])"
)
_NOT_TOP_LEVEL = frozenset(
    {"png", "jpg", "jpeg", "gif", "svg", "webp", "pdf", "py", "js", "ts", "transpose", "shape", "size", "inverse", "values", "value",
     "dtype", "ndim", "grad", "weight", "weights", "bias", "data", "real", "imag", "conj", "flat", "item", "mean", "sum", "std", "max",
     "min", "dot", "numpy"}
)  # fmt: skip
"""Files and attributes of arrays, which stand after an @ in other roles."""


def email_spans(text: str) -> Spans:
    """E-mail addresses. `A@B.T`, `x@w.transpose(0, 1)`, `logo@2x.png` and `git@host:repo` are none."""
    if "@" not in text:
        return []
    return [match.span() for match in _EMAIL.finditer(text) if _is_email(match, text)]


def _is_email(match: re.Match[str], text: str) -> bool:
    top = match.group(2)
    if top in _NOT_TOP_LEVEL or not (top.islower() or top.isupper()):
        return False
    start, end = match.span()
    return not (text.startswith("git@", start) and text[end : end + 1] == ":")


_PHONE_PLUS = re.compile(
    r"(?<![\w+.,])\+([1-9][0-9]{0,2}(?:[0-9]{7,12}|(?:(?:[ .\-]\(?|\(|(?<=\)))[0-9]{1,8}\)?){2,6}))(?![\w%]|[.,][0-9])"
)
_PHONE_NANP = re.compile(
    r"(?<![\w.+\-/*])(?:1[ .\-])?(?:\([2-9][0-9]{2}\) ?|[2-9][0-9]{2}[ .\-])[2-9][0-9]{2}[.\-][0-9]{4}(?![\w\-/*^]|\.[0-9])"
)
_PHONE_LABEL = re.compile(
    r"(?i)(?<![a-z])(?:tel(?:ephone)?|phone|mobile|cell ?phone|fax|whatsapp|hotline)(?:[ ](?:number|no))?[.:#]{0,2}"
    r"(?:[ ](?:is|at))?[:=]?[\s\"']{0,3}(\(?[0-9][0-9 .()\-/]{5,18}[0-9])(?![\w%]|[.,][0-9])"
)
_BEFORE_SIGN = re.compile(r"(?:[0-9)]|[0-9a-z][\]}]|(?<![A-Za-z])[A-Za-z])$")


def phone_spans(text: str) -> Spans:
    """Phone numbers; a `+` between two terms of a sum begins none."""
    found: Spans = []
    if "+" in text:
        for match in _PHONE_PLUS.finditer(text):
            groups = re.findall("[0-9]+", match.group(1))
            before = text[max(0, match.start() - 16) : match.start()].rstrip()
            whole = 8 <= sum(map(len, groups)) <= 15 and sum(len(g) == 1 for g in groups[1:]) <= 1
            if whole and not _BEFORE_SIGN.search(before):
                found.append(match.span())
    found += (match.span() for match in _PHONE_NANP.finditer(text))
    lower = text.lower()
    if any(word in lower for word in ("tel", "phone", "mobile", "fax", "whatsapp", "hotline")):
        for match in _PHONE_LABEL.finditer(text):
            digits = sum(c.isdigit() for c in match.group(1))
            if 7 <= digits <= 15:
                found.append(match.span(1))
    return found


_CARD = re.compile(
    r"(?<![\w.\-,+])[2-6][0-9]{3}(?:([ \-])[0-9]{4,6}\1[0-9]{4,5}(?:\1[0-9]{4}(?:\1[0-9]{1,3})?)?|[0-9]{9,15})(?![\w\-]|[.,][0-9])"
)


def card_spans(text: str) -> Spans:
    """Card numbers: a known issuer's first digits, length and grouping, and the check digit of Luhn."""
    return [match.span() for match in _CARD.finditer(text) if _is_card(match)]


def _is_card(match: re.Match[str]) -> bool:
    groups = [len(part) for part in re.split("[ -]", match.group())]
    digits = re.sub("[^0-9]", "", match.group())
    if len(groups) > 1 and groups not in ([4, 4, 4, 4], [4, 4, 4, 4, 3], [4, 6, 5], [4, 6, 4]):
        return False
    n, two, four = len(digits), int(digits[:2]), int(digits[:4])
    known = (
        (digits[0] == "4" and n in (13, 16, 19))
        or ((51 <= two <= 55 or 2221 <= four <= 2720) and n == 16)
        or (two in (34, 37) and n == 15)
        or (two in (36, 38, 39) and n == 14)
        or ((four == 6011 or two in (62, 64, 65)) and 16 <= n <= 19)
        or (3528 <= four <= 3589 and n == 16)
    )
    return known and len(set(digits)) > 1 and luhn(digits)


def luhn(digits: Sequence[str]) -> bool:
    """Whether a number of digits passes the check of ISO/IEC 7812-1, annex B."""
    total = 0
    for place, digit in enumerate(reversed(digits)):
        value = int(digit) * (2 if place % 2 else 1)
        total += value - 9 if value > 9 else value
    return total % 10 == 0


_IPV4 = re.compile(r"(?<![\w.\-])(?:[0-9]{1,3}\.){3}[0-9]{1,3}(?![\w\-]|\.[0-9])")
_IPV6 = re.compile(r"(?<![\w:.])[0-9A-Fa-f:]{6,39}+(?:(?:\.[0-9]{1,3}){3})?(?![\w:])")


def ip_spans(text: str) -> Spans:
    """IP addresses other than loopback and unspecified ones. A version of four numbers looks the same: switch the rule on knowingly."""
    found = [match.span() for match in _IPV4.finditer(text) if _is_ip(match.group())]
    if ":" in text:
        found += (match.span() for match in _IPV6.finditer(text) if _is_long_ipv6(match.group()) and _is_ip(match.group()))
    return found


def _is_long_ipv6(text: str) -> bool:
    groups = [group for group in text.split(":") if group]
    return len(groups) >= 2 and any(len(group) >= 3 for group in groups) and (text.count(":") == 7 or "::" in text)


def _is_ip(text: str) -> bool:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    return not (address.is_loopback or address.is_unspecified)
