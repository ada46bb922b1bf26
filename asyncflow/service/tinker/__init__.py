"""Tinker's REST API: models that clients of the public `tinker` SDK train and sample from, on AsyncFlow's engines.

    SDK --HTTP--> routes.py --+--> TrainedModel (trained_model.py) --> a train engine each --> checkpoint_store.py
                              +--> Samplers (samplers.py) -----------> rollout engines <-----------+
         <-- retrieve_future --- results.py <------ answers (answers.py)

consumes: requests, each of which is answered at once with the id of its result
waits for: training requests, for those of the model with smaller numbers; samples, for weights to be installed
is unblocked by: the engines

A client computes its loss's inputs and chooses each update's hyperparameters; this server has the weights: a model in
training is a low-rank adapter over the server's base, or, with `--full-weights`, all weights. What a request says is checked before
anything is computed.
"""
