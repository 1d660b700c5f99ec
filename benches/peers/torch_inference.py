# Half-precision transformer inference, one request every few milliseconds, for `forebay bench sharing`: an ordinary PyTorch
# program. Says how many it has answered, when the last one was, and how long each new one took, ms.
import random, time
import torch

torch.manual_seed(1)
random.seed(1)
layer = torch.nn.TransformerEncoderLayer(1024, 16, 4096, dropout=0.0, batch_first=True)
model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).half().cuda().eval()
tokens = torch.randn(1, 128, 1024, dtype=torch.half, device="cuda")
done, new, said = 0, [], time.monotonic()
with torch.inference_mode():
    for _ in range(50):
        model(tokens)
    torch.cuda.synchronize()
    while True:
        time.sleep(random.uniform(0.003, 0.007))
        begun = time.perf_counter()
        answer = model(tokens)[0, 0, :4].cpu()
        new.append((time.perf_counter() - begun) * 1e3)
        done += 1
        if time.monotonic() - said > 0.05:
            print(done, "@%d" % time.monotonic_ns(), *("%.4f" % n for n in new), flush=True)
            new, said = [], time.monotonic()
