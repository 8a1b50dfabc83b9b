"""What runs on the nodes around the agents: for a batch script under Slurm, and for pods.

begin  ○ may it start?            before srun, on the batch host beat   ● the batch host lives
beside srun steps  ● an srun for each node, again where it is lost agent  ● one node's agent, and
its watchdog, should the batch host be lost watchdog  ● the same alone, where agents are in
containers without scontrol end    ○ what came of it          after srun again  ○ the job goes back
into the queue keep-off  ○ the successor of a chain starts on no machine that the run has excluded
pod    ● PID 1 of a pod: begin, agent, end, and the code its controller understands save   ● its
preStop: a checkpoint now
"""
