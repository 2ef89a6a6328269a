"""Reports: pure functions of :class:`oracle.report.outcome.Report`; no tensor is touched here."""
