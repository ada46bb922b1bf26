"""The loops: coroutines that see a queue client, the ledger, the versions and one engine, and nothing else.

    feed --put--> [transfer queue] --lease--> rollout --complete--> [transfer queue] --lease--> taking
      ^                                          ^                                                |
      |                                          |                                              offer
      |                                          |                                                v
      +---------- ledger: which steps there are, which groups belong to them, and their rounds ---+
                                                 |         ^ commit       | next_round
                  policy versions <--publish-----+------- train <---------+

algorithm1.py has feed, produce and train: Algorithm 1 (PA, section 4). The life of one sample, call by call:

    feed          LedgerService.may_admit         the schedule lets its step's prompts enter
                  Admissions.step                 its prompt is taken from the data
                  LedgerService.open              its group belongs to the step
                  TransferQueueClient.put         its group is stored
    Rollout       TransferQueueClient.lease       a worker takes the group
      produce     RolloutEngine.generate          the response
                  ResponseScoring.score           its reward
                  TransferQueueClient.complete    both are stored
    Taking        ClientLeases.ask                the driver takes the complete group
                  LedgerService.offer             it can be trained
    train         LedgerService.may_start         the schedule lets the trainer begin the step
    Rounds        LedgerService.next_round        a rank is given the group, in a round of all ranks
                  Algorithm.advantages
    train         TrainEngine.forward_backward    its gradient is added
    Rounds        LedgerService.next_round        the step counts it
                  LedgerService.totals            all of the step is there
    train         TrainEngine.optim_step          the weights change
                  LedgerService.commit            the step is final
                  PolicyVersions.probe_ids        a sequence that shows which weights an engine has
                  TrainEngine.export_weights      the new weights, whole
                  LedgerService.released          the step's groups are done with
    Publishing    PolicyVersions.retained         older weights that are needed still stay
                  WeightSender.publish            the new weights are written
                  PolicyVersions.publish          the workers know of them
    Taking        TransferQueueClient.mark        the sample is done
                  TransferQueueClient.drop        and leaves the queue
    Rollout       PolicyVersions.next_target      a worker learns of the version
                  WeightReceiver.fetch
                  PolicyVersions.may_install      the schedule lets it change
                  RolloutEngine.install           later samples are the new policy's
                  PolicyVersions.installed        the driver learns of it
"""
