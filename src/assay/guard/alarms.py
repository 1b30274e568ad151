"""Alarms: where they go, and what became of each; never on the training path.

`send` tries every target of an event once, bounded in time, and never raises: what failed is said, and the guard tries
again. Targets are named by their place in the policy, so that no address or secret enters a receipt.
"""

from __future__ import annotations

import http.client
import json
import smtplib
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from email.message import EmailMessage
from pathlib import Path
from typing import Any

from assay.guard.policy import Alarm, Event, Mail, Policy

TIMEOUT = 10.0  # seconds for one target; a program has its own
NAME, PASSWORD = "ASSAY_SMTP_USER", "ASSAY_SMTP_PASSWORD"


def targets(policy: Policy, event: Event) -> list[str]:
    """The names of the targets that want this event: place in the policy and kind, such as `1 webhook`."""
    return [
        f"{number} {_kind(alarm)}"
        for number, alarm in enumerate(policy.alarms, 1)
        if alarm.on is None or event in alarm.on
    ]


def send(
    policy: Policy, to: Iterable[str], facts: Mapping[str, Any], folder: Path, environ: Mapping[str, str]
) -> dict[str, str | None]:
    """Each target of `to` with None, or in words why the alarm did not arrive; one attempt each.

    `facts` is what is sent, as JSON to a webhook and on a program's standard input, as lines in a mail.
    """
    wanted, found = set(to), dict[str, str | None]()
    for number, alarm in enumerate(policy.alarms, 1):
        name = f"{number} {_kind(alarm)}"
        if name in wanted:
            found[name] = _one(alarm, facts, folder, environ)
    return {name: found.get(name) if name in found else "the policy has no such target any more" for name in wanted}


def _kind(alarm: Alarm) -> str:
    return "webhook" if alarm.webhook else "command" if alarm.command else "mail"


def _one(alarm: Alarm, facts: Mapping[str, Any], folder: Path, environ: Mapping[str, str]) -> str | None:
    body = json.dumps(facts, ensure_ascii=False).encode()
    if alarm.webhook is not None:
        return _post(alarm.webhook.url, body)
    if alarm.command is not None:
        try:
            done = subprocess.run(
                alarm.command.argv, input=body, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder,
                check=False, timeout=alarm.command.timeout_seconds,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"it did not end within {alarm.command.timeout_seconds} s"
        except (OSError, ValueError) as fault:
            return f"it cannot be started: {getattr(fault, 'strerror', None) or type(fault).__name__}"
        return None if done.returncode == 0 else f"it ended with code {done.returncode}"
    assert alarm.mail is not None  # exactly one is given
    return _mail(alarm.mail, facts, environ)


def _post(url: str, body: bytes) -> str | None:
    if not url.startswith(("https://", "http://")):
        return "its address is not of http or https"
    wanted = urllib.request.Request(url, body, {"Content-Type": "application/json"}, method="POST")  # noqa: S310
    try:
        with urllib.request.urlopen(wanted, timeout=TIMEOUT):  # noqa: S310
            return None
    except urllib.error.HTTPError as fault:
        fault.close()
        return f"HTTP status {fault.code}"
    except (OSError, ValueError, http.client.HTTPException) as fault:
        return f"no answer: {type(fault).__name__}"  # the words of the fault may hold the address


def _mail(mail: Mail, facts: Mapping[str, Any], environ: Mapping[str, str]) -> str | None:
    """By SMTP, with STARTTLS where it is offered; a password goes to a server that proved its name, or not at all.

    `server` may end in `:port`.
    """
    host, _, port = mail.server.partition(":")
    message = EmailMessage()
    message["Subject"] = f"assay: {facts.get('alarm')} of {facts.get('run')}"
    message["From"], message["To"] = mail.sender, ", ".join(mail.to)
    message.set_content("\n".join(f"{key}: {value}" for key, value in facts.items()))
    try:
        with smtplib.SMTP(host, int(port or 25), timeout=TIMEOUT) as server:
            server.ehlo()
            if server.has_extn("starttls"):
                server.starttls(context=ssl.create_default_context())
            elif environ.get(NAME):
                return "the server offers no STARTTLS, and a password is not sent in the clear"
            if environ.get(NAME):
                server.login(environ[NAME], environ.get(PASSWORD, ""))
            server.send_message(message)
    except (OSError, ValueError, smtplib.SMTPException) as fault:
        return f"the mail was not taken: {type(fault).__name__}"
    return None
