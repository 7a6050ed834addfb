"""One self-contained HTML page with tables and plots: no script, no request, dark and light."""

from lakebed.report.model import Line, Verdict
from lakebed.report.page import Report

__all__ = ["Line", "Report", "Verdict"]
