"""The loops: coroutines that see a queue client, the ledger, the versions and one engine, and nothing else.

    feed --put--> [transfer queue] --lease--> rollout --complete--> [transfer queue] --lease--> train
      ^                                          ^                                                |
      +-- ledger: what belongs to which step <---|------ consume, commit -------------------------+
                policy versions                  <----- publish ---------------------------------+

algorithm1.py has feed, produce and train: Algorithm 1 (PA, section 4). The life of one sample, call by call:

    feed          LedgerService.may_admit         the schedule lets its step's prompts enter
                  Admissions.step                 its prompt is taken from the data
                  LedgerService.open              its group belongs to the step
                  TransferQueueClient.put         its group is stored
    Rollout       TransferQueueClient.lease       a worker takes the group
      produce     RolloutEngine.generate          the response
                  ResponseScoring.score           its reward
                  TransferQueueClient.complete    both are stored
    Rounds        TransferQueueClient.lease       a trainer takes the complete group
                  Algorithm.advantages
                  LedgerService.offer             the group is ready on this rank
                  LedgerService.round_of_rank     it is trained in this round, on all ranks alike
    train         TrainEngine.forward_backward    its gradient is added
                  LedgerService.consume           the step counts it
                  LedgerService.totals            all of the step is there
                  TrainEngine.optim_step          the weights change
                  LedgerService.commit            the step is final
    Publishing    TrainEngine.export_weights
                  WeightSender.publish            the new weights are written
                  PolicyVersions.publish          the workers know of them
    Rounds        TransferQueueClient.mark        the sample is done
                  TransferQueueClient.drop        and leaves the queue
    Rollout       PolicyVersions.next_target      a worker learns of the version
                  WeightReceiver.fetch
                  PolicyVersions.may_install      the schedule lets it change
                  RolloutEngine.install           later samples are the new policy's
"""
