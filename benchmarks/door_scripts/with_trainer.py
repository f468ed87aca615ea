import sys
from tempfile import mkdtemp

from task import BATCH, LEARNING_RATE, STEPS, evaluate, make_data, make_model, mark
from transformers import Trainer, TrainerCallback, TrainingArguments


class Marker(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            mark("begin")


seed = int(sys.argv[1])
blocks, held_out = make_data(seed)
model = make_model(seed)
arguments = TrainingArguments(
    output_dir=mkdtemp(),
    use_cpu=True,
    max_steps=STEPS,
    per_device_train_batch_size=BATCH,
    learning_rate=LEARNING_RATE,
    lr_scheduler_type="constant",
    weight_decay=0.01,
    max_grad_norm=0.0,
    logging_strategy="no",
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
    seed=seed,
)
trainer = Trainer(
    model=model,
    args=arguments,
    train_dataset=[{"input_ids": x, "labels": x} for x in blocks],
    callbacks=[Marker()],
)
trainer.train()
mark("end")
mark("loss", evaluate(model, held_out))
