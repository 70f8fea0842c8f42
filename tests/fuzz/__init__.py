"""Faults as careless users and bad machines make them, and what must hold whatever they are.

A *case* is one fault and one command. It holds if the command ends within 20 seconds, with an exit code that is
documented, without a traceback, with one sentence if it fails; if nothing else that was finished has changed; and if,
where it says that all is well, its result is that of the undamaged files, or the fault was told.
"""
