"""Experts: models that are trained apart and joined only where they are used. HDEE and SMALLTALK LM on one core.

records     domains.Domain           a kind of text: name, difficulty, where it lies, whether it is trained on
            assignment.Assignment    which expert trains on which sequence of a pool
            jobs.Job                 one expert's training: an ordinary run directory, and the weights it starts from
            registry.Forest          the experts that are served together: names and run directories, as JSON
work        tasks                    runs one after another, or several at once in processes of their own
core        mixture                  scores of E experts -> posterior -> one distribution (numbers only, no models)
            priors                   what is believed of the experts before a sequence begins
            served.Served            models in memory: scores, next token, average
            routing, clusters        gates that read the beginning of a text, or all of it as it grows
            joining.Joined           a forest that answers in the way that was asked for
            averages                 one set of parameters out of several experts, to branch from
            meters                   FLOPs of training, routing and serving; the budget rule; bytes
systems     hdee                     seed -> branch by difficulty and budget -> ensemble with a domain posterior
            smalltalk                routers by balanced EM -> segments -> experts -> one expert a sequence

    text --domains--> runs (running.run, each alone: 0 bytes between them) --registry--> forest
    sequences --served--> scores (E, N, T) --mixture, priors--> perplexity by domain, posterior, text

An expert is trained by `running.run` like any other run, so with any replica method and several workers. Names end
in their axes: E experts, N sequences, T tokens, V vocabulary. Scores are log-probabilities in nats, float64.
"""
