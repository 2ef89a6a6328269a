"""Models of matrix instructions and of whole kernels, bit for bit.

``instructions`` (facts) -> ``fused`` (the definition) -> ``schedules`` (whole kernels) -> ``predict``;
``vectors`` checks the facts against published hardware vectors; ``identify``, ``probes`` and ``fingerprint``
go the other way, from outputs to the schedule.
"""
