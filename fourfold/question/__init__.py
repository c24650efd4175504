"""Questions to a run, answered by computing its steps again.

    history   the directory of a run, read only: its checkpoints, its records, the configuration
              each step was computed with; `Segment.build` makes an engine that stands before a step
    replay    one step again, with what happened inside it
    prove     all steps, or some, against what the run recorded and saved
    bisect    a step in two layouts (`sides`), written down tensor by tensor (`step_trace`), against
              a float64 reference and what rounding explains (`noise`)
    run_diff  what differs between two runs; `explain` by replays, why

What a run did is a function of its checkpoint before, its configuration and its data, so nothing
has to be recorded for these questions while it trains. None of them writes into the run's
directory or takes its lock.
"""
