# Training in bf16 that takes all of the GPU, for `forebay bench sharing`: an ordinary PyTorch program. Says how many steps it
# has done, and when the last one was.
import time
import torch

torch.manual_seed(1)
layer = torch.nn.TransformerEncoderLayer(1024, 16, 4096, dropout=0.0, batch_first=True)
model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
data = torch.randn(16, 128, 1024, device="cuda")
done, said, ended = 0, time.monotonic(), []
while True:
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = (model(data) - data).square().mean()
    loss.backward()
    optimizer.step()
    event = torch.cuda.Event()
    event.record()
    ended.append(event)
    # Two steps on their way, as data loaders have it.
    if len(ended) > 2:
        ended.pop(0).synchronize()
        done += 1
        if time.monotonic() - said > 0.05:
            print(done, "@%d" % time.monotonic_ns(), flush=True)
            said = time.monotonic()
