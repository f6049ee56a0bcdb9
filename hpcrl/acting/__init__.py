"""From environments to unrolls: batches of environments, the policy, its pace, the unrolls."""
