"""One library per module, imported only when it is used.

Each backend offers ``why_not(problem, machine, config) -> str | None`` (pure: it looks at records, never at
tensors) and plain functions that run. Backends never import one another.
"""
