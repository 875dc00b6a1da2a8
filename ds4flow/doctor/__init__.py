"""The GGUF doctor: what a model file is, whether it runs and what that costs, before it is read."""

from ds4flow.doctor.command import inspect_command
from ds4flow.doctor.convert import convert_mtp
from ds4flow.doctor.examine import examine
from ds4flow.doctor.report import Report
from ds4flow.doctor.show import print_report

__all__ = ["Report", "convert_mtp", "examine", "inspect_command", "print_report"]
