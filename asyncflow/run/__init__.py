"""The composition root: configuration in, a run's parts out. The only room that knows every other.

    preparation/   inputs are read and checked            models/     where the model comes from, and where it goes
    services/      what the driver serves                 records/    metrics and the certificate
    in_worker/     parts of a worker process              state/      checkpoints, the journal, and the way back from them
    trials/        what is tried without a run

Four objects hold a run. Each makes its parts, which live as long as it does:

    Job                        a command, `asyncflow train` or a `Trainer`: makes attempts until the run is done
        Journal                keeps what somebody outside was told is safe
        PushedPrompts          those that come while it goes on
        Restarts               how many there were, and may be
    Attempt                    an attempt, from the start of its workers to their end: in its order, with grace or at once
        Scaling                workers that join and leave
    Running                    the loops and workers of an attempt, and what becomes of the first that fails
    Driver                     state and services of an attempt
        RunContext             what its parts share, frozen
        BackgroundTasks        work that nobody waits for
        RunRecord              files, metrics, certificate
        Evaluating             evaluations to be made
        Health                 workers that do not serve
        CheckpointCoordinator  the driver's part of checkpoints
        MemoryPace             decides when one is made in shared memory
        FreeCores              cores that are lent
        Devices                their number over time
        TrainDesk              groups for trainers from outside
        Handover               workers that stay for the next attempt
        ModelFiles             the model, for other machines
        Rendezvous             ranks on several machines find one another

Beside them:

    StepwiseRun                asks a job for one step after another, in the place of `Job.run`
    Listener                   is told what happens in a command
    RunFolder, StepRows        made anew for each attempt: the run's folder, and metrics of all steps so far
    Watch, Situations          one for each attempt: whether it still moves, and what waits for what
    MetricRows, TrainingChecks parts of the record: a row a step, and warnings about what is trained
    RunConnection              the run's services, as a worker sees them
    CheckpointWriter           a trainer's part of checkpoints
    StepState, UpdateProgress  a step in the driver's ledger, and the rounds of one of its updates
"""
