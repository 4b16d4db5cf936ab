"""Stage validate: raw records become canonical files, split by prompt group, or the pipeline stops here.

The work is data.pipeline.run; this module gives it the parameters and publishes what it wrote. The data docs
and a copy of the quarantine go to `.plumbline/docs/data`, also when the stage fails.
"""

from __future__ import annotations

from data import pipeline
from tasks import stage as stages
from tasks.places import home


def body(stage: stages.Stage) -> None:
    """Validate the sources of the `data` section and publish the files of the stage."""
    docs = home(stage.project) / "docs" / "data"
    result = pipeline.run(stage.params.data, stage.params.seed, stage.work, docs, stage.progress)
    print(
        f"validate: {result['rows_in']} rows, {result['rows_kept']} kept, {result['rows_refused']} refused; "
        f"pairs {result['pairs']}; data docs: {docs / 'index.html'}"
    )
    stage.publish_result(result, *pipeline.OUTPUTS)


if __name__ == "__main__":
    stages.run("validate", body)
