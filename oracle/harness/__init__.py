"""Runs a foreign kernel in a worker process and watches what it does; :func:`oracle.validate` is the verb.

    process, worker    the kernel in its own process, with a time limit and the cause of every loss
    protocol, memory   what a worker may reply, and the memory that it shares: guard zones and poison
    starting           the error where the system starts no process or thread
    launcher, sandbox  the process between both, which ends all descendants, and what an untrusted kernel sees
    concurrency        one kernel called from several threads
    session            one call, one verdict
    watches, offsets             what is watched besides the numbers
    probing            how a kernel computes, by probes that run in the worker
    validation, report a whole validation, and what it found
    subjects, runner   registered routines over cases, and captured outputs
    recording          their outputs as a captures folder
    provenance         the machine and the versions

The harness judges nothing itself: numbers go to the contract. Not covered: several devices at once.
"""
