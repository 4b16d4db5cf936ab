"""When things run: the Prefect flow over the DAG, the command line, servers and schedules."""
