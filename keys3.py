import pathlib, dataclasses
from tests.cpu import vision_towers as vt
for n in ("ling3vl", "minimax_m3"):
    t = vt.TOWERS[n]; p2 = (t.patch * t.merge) ** 2
    t2 = dataclasses.replace(t, further={**t.further, "image_min_pixels": 20 * p2, "image_max_pixels": 50 * p2})
    t2.write(pathlib.Path(f"/tmp/wt/qwen_scratch/mm/{n}-lim.gguf"), t2.weights())
