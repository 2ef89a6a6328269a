"""Reports: pure functions of :class:`oracle.outcome.Report`; no tensor is touched here."""
