"""What a batch script runs on the nodes: one start of a run under Slurm, from begin to end.

    begin  ○ may it start?            before srun, on the batch host
    beat   ● the batch host lives     beside srun
    agent  ● one node's agent, and the caretaker should the batch host be lost
    care   ● that caretaker alone, where agents are in containers that have no scontrol
    end    ○ what came of it          after srun

`decide.py` has the decisions (pure), `attempt.py` what is kept of an attempt in RUN/attempts/,
`board.py` reads the board, `slurm.py` speaks to the controller.
"""
