"""What the parts of a model are worth: the likelihood of responses without a part, against that with all of them."""

from __future__ import annotations

import logging

log = logging.getLogger("empax")


def with_gains(averages: dict[str, float], without: str, instead: str) -> dict[str, float]:
    """Adds `NAME_gain` for each metric `without` + NAME: how much the log-likelihood per token exceeds it, in nats.

    Warns if there is no gain, since the part NAME then does not influence the responses; `instead` says what replaced
    it.
    """
    gains = {}
    for metric, nll in averages.items():
        if metric.startswith(without):
            name, gain = metric.removeprefix(without), nll - averages["nll"]
            gains[f"{name}_gain"] = gain
            if gain <= 0:
                log.warning("%s unused: with %s, the likelihood is as high (gain %.4f nats).", name, instead, gain)
    return {**averages, **gains}
