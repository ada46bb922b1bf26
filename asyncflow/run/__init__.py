"""The composition root: configuration in, a run's parts out. The only room that knows every other.

    preparation/   inputs are read and checked            models/     where the model comes from, and where it goes
    services/      what the driver serves                 records/    metrics and the certificate
    in_worker/     parts of a worker process              state/      checkpoints, the journal, and the way back from them
    trials/        what is tried without a run

What lives as long as what, from the longest to the shortest:

    a command                  `asyncflow train`, or a `Trainer`
      Job                      makes attempts, one after another, until the run is done
      StepwiseRun              asks a job for one step after another, in the place of `Job.run`
      Listener                 is told what happens
      Journal                  keeps what somebody outside was told is safe
    an attempt                 in the command's process
      RunFolder                what the attempt finds in the run's folder, and leaves there
      StepRows                 metrics of all steps so far
      Attempt                  starts and ends these three:
      Running                  the driver's loops and the workers, watched
      Watch                    says what stands, and ends a run in which nothing moves
      Situations               what waits for what, at a moment
      Scaling                  workers that join and leave
      Driver                   makes the state and the services of the attempt:
      RunContext               what the driver's parts share
      BackgroundTasks          work that nobody waits for
      RunRecord                files, metrics, certificate
      MetricRows               a row a step
      TrainingChecks           oddities of what is trained
      Evaluating               evaluations to be made
      Health                   workers that do not serve
      CheckpointCoordinator    the driver's part of checkpoints
      MemoryPace               when there is one in shared memory
      FreeCores                cores that are lent
      Devices                  how many there were, by the time
      TrainDesk                groups for trainers from outside
      Handover                 workers that stay for the next attempt
      ModelFiles               the model, for other machines
      Rendezvous               ranks on several machines find one another
    a worker in an attempt     its process and its engine may stay for the next attempt
      RunConnection            the run's services, as the worker sees them
      CheckpointWriter         a trainer's part of checkpoints
    a step                     in the driver's ledger, from its admission to its commit
      StepState                its members, and how far each is
      UpdateProgress           rounds of one of its updates
"""
