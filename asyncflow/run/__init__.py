"""The composition root: configuration in, a run's parts out. The only room that knows every other.

prepare.py   everything that can be wrong is found here, before anything starts
driver.py    the driver's services and loops: ledger, versions, controllers, storage units, telemetry
workers.py   the mains of the worker processes: rollout and trainer
"""
