"""The texts of an emulated cluster: slurm.conf, what head and nodes start, client commands."""

from __future__ import annotations

SLURM_CONF = """\
ClusterName=emulated
SlurmctldHost=head({head})
SlurmUser=root
AuthInfo=socket={dir}/munge.sock,cred_expire=5
StateSaveLocation={dir}/state
SlurmdSpoolDir={dir}/spool/%n
SlurmctldPidFile={dir}/ctld.pid
SlurmdPidFile={dir}/slurmd.%n.pid
SlurmctldLogFile={dir}/log/ctld
SlurmdLogFile={dir}/log/%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
GresTypes=gpu
TopologyPlugin=topology/tree
JobCompType=jobcomp/filetxt
JobCompLoc={dir}/log/jobcomp
SlurmdTimeout=10
MessageTimeout=5
BatchStartTimeout=1
KillWait=5
ReturnToService=2
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
NodeName=n[1-{num_nodes}] CPUs=16 RealMemory=16000 Gres=gpu:8
PartitionName=main Nodes=ALL Default=YES
PartitionName=spare Nodes=n1 MaxTime=10
"""
HEAD = """\
set -eu
hostname head; mount --bind "$D/hosts" /etc/hosts; ip link set lo up
ip link add br0 address 02:68:66:73:00:01 type bridge  # its own, that no port changes
ip addr add {head}/24 dev br0; ip link set br0 up
munged --foreground --force --socket="$D/munge.sock" --key-file="$D/munge.key" \\
  --pid-file="$D/munged.pid" --log-file="$D/log/munged" --seed-file="$D/seed" &
touch "$D/up.head"
sleep infinity & wait
"""
NODE = """\
set -eu
hostname "$1"; mount --bind "$D/hosts" /etc/hosts
mount -t tmpfs -o size=1g shm /dev/shm; ip link set lo up
touch "$D/up.$1"
until ip link set eth0 up 2>/dev/null; do sleep .02; done
ip addr add "$2/24" dev eth0
slurmd -D -N "$1" &
sleep infinity & wait
"""
# What sbatch exports comes back on the nodes, PATH too: there the real command is meant.
CLIENT = """\
#!/bin/sh
[ "${{SLURMD_NODENAME-}}" ] && exec {real} "$@"
SLURM_CONF={dir}/slurm.conf exec nsenter -t {pid} -n -m -u --wdns="$PWD" {real} "$@"
"""
