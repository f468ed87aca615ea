"""Emulated hosts on one machine, joined by links of a stated rate."""

from cgx.testbed.base import HostSet
from cgx.testbed.counters import Counters, read_counters
from cgx.testbed.goodput import measure_goodput
from cgx.testbed.hosts import Hosts, refusal
from cgx.testbed.job import Job, JobFailedError, Line
from cgx.testbed.loopback import LoopbackHosts, open_hosts
from cgx.testbed.namespaces import NamespacesRefusedError
from cgx.testbed.rates import format_rate, parse_rate

__all__ = [
    "Counters",
    "HostSet",
    "Hosts",
    "Job",
    "JobFailedError",
    "Line",
    "LoopbackHosts",
    "NamespacesRefusedError",
    "format_rate",
    "measure_goodput",
    "open_hosts",
    "parse_rate",
    "read_counters",
    "refusal",
]
