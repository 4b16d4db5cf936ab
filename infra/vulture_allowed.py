"""What is used by name only: fields of params and records, dotted paths, attributes that libraries read."""

Judgement  # noqa
ReasoningGym  # noqa
TOKEN_ADVANTAGES  # noqa
WeightReceiver  # noqa
_._name_or_path  # noqa
_.build_shm_op  # noqa
_.pad_token  # noqa
_.preserve_quotes  # noqa
_.progress_bars  # noqa
_.use_cache  # noqa
best_of_n_kl  # noqa
confidence_sequence  # noqa
error_type  # noqa
gold_peak  # noqa
gold_reward  # noqa
gsm8k  # noqa
ifeval  # noqa
ifeval_strict  # noqa
kwargs  # noqa
mcnemar_exact  # noqa
model_config  # noqa
paired_bootstrap  # noqa
plumbline_load  # noqa
post  # noqa
threshold  # noqa
topic  # noqa
