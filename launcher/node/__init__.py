"""What runs on the nodes around the agents: for a batch script under Slurm, and for pods.

    begin  ○ may it start?            before srun, on the batch host
    beat   ● the batch host lives     beside srun
    steps  ● an srun for each node, again where it is lost
    agent  ● one node's agent, and the caretaker should the batch host be lost
    care   ● that caretaker alone, where agents are in containers that have no scontrol
    end    ○ what came of it          after srun
    pod    ● PID 1 of a pod: begin, agent, end, and the code its controller understands
    save   ● its preStop: a checkpoint now

`decide.py` has the decisions (pure), `attempt.py` what is kept of an attempt in RUN/attempts/,
`board.py` reads the board, `slurm.py` speaks to the controller, `pod_decide.py` has what pods
decide (pure).
"""
