"""The two small workloads that `cgx demo` trains: real text and real images, no downloads."""

from cgx.cli.demo.models.task import TASKS, Evaluation, Task, find_tasks

__all__ = ["TASKS", "Evaluation", "Task", "find_tasks"]
