"""Experts: models that are trained apart and joined only where they are used. HDEE and SMALLTALK LM on one core.

domains.Domain          a kind of text: name, difficulty, path, whether it is trained on
jobs.ExpertJob          one expert's training: an ordinary run directory, and the weights it starts from; `run_tasks`
                        runs jobs one after another, or several at once in processes of their own
forest.Forest           the experts that are served together: names and run directories, as JSON; `Served`: its models
                        in memory: scores, next token, average
mixture                 scores of E experts -> posterior -> one distribution (numbers only, no models)
routing                 gates that read the beginning of a text, or all of it as it grows; priors; which expert trains
                        on which sequence of a pool
ensemble                a forest that answers by the user's choice of prior, gate and experts
evaluation              losses of experts and of every way to join them, from their scores alone
meters, planning        FLOPs, the budget rule, bytes; what a system will cost before it is trained
reading, system         a user's settings; what the two systems share as programs
hdee, smalltalk         the two systems: seed -> branch by difficulty and budget -> ensemble with a domain posterior;
                        routers by balanced EM -> segments -> experts -> one expert a sequence (`smalltalk_run`: its
                        runs, from settings to results)

    text --domains--> runs (running.run, each alone: 0 bytes between them) --> forest
    sequences --Served--> scores (E, N, T) --mixture, priors--> perplexity by domain, posterior, text

An expert is trained by `running.run` like any other run, so with any replica method and several workers. Names end
in their axes: E experts, N sequences, T tokens, V vocabulary. Scores are log-probabilities in nats, float64.
"""
