"""Kill storms: a run of real processes that are killed and stopped at random moments.

    python -m tests.kill_storm --kills 500 --seed 7 [--store file | s3 | URL]

Rule 1: every inner step can be counted. Process number n of a storm adds one step to
        coordinate n of every fragment, and to nothing else, in a unit that stays a
        whole number through every mean of the run.
Rule 2: what must be in the final anchor is computed from the rosters and from copies
        of the updates that islands kept before they sent them, in whole numbers, and
        compared exactly.
Rule 3: the seed draws kinds, victims and pauses. The moments are those of real
        processes, so that a repetition meets them nearly, not exactly.

Start reading at `storm.Storm`, then `accounts`.
"""
