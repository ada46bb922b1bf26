"""The service: a run over HTTP, for processes that are not the run's own.

    client --HTTP--> connection (limits.py) --> gate (app.py: key, rate, size, repeats, audit) --> a route --> the run's driver

consumes: requests with a key
waits for: whatever the request asks for, no longer than it allows
is unblocked by: the run

The service adds names and keys to a run, and no second state: leases, versions and steps are those of the run's own queue,
`PolicyVersions` and ledger. FastAPI and uvicorn come with the extra `service`; besides this room the
capture endpoint alone (`environments/capture/`) imports one of them, uvicorn.
"""
