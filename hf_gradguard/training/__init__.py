"""`GradGuardTrainer`: one client's batch becomes one protected message before anything is
exchanged.
"""
