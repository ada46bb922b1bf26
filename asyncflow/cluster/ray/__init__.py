"""Ray, and whatever only it needs: nothing else imports this folder.

cluster.py       `RayCluster`, which a run chooses
requirements.py  options, and which nodes a worker may run on
connection.py    connection to Ray; guard.py: the owner of a cluster that is started for one run
places.py        placement groups, with a bundle and a host for each worker
node_folders.py  files of workers on other nodes
host.py          the host of a worker's process, on its node; process.py: that process, seen from the driver
"""
