"""Words that texts draw from: names, animals, things, places, weather."""

from __future__ import annotations


def _split(text: str) -> tuple[str, ...]:
    return tuple(text.split())


GIRLS = _split(
    "Rosa Emma Tess Ella Ruby Zoe Maya Lena Alice Bella Daisy Eva Fay Gwen Hanna Iris Jane Kira"
    " Lily Mabel Nina Olive Petra Quinn Rita Sofia Tilda Una Vera Willa Yara Zara Amy Beth Cleo"
    " Dora Elsa Flora Grace Heidi Ivy Julia Kate Lucy Mary Molly Nell Paula Sally Susan Anna Carla"
    " Emily Sarah Laura Maria Olivia Chloe Mia Lara"
)
BOYS = _split(
    "Pip Leo Jack Max Finn Noah Theo Kit Adam Basil Carl Daniel Emil Fred George Henry Ivan Jonas"
    " Karl Luke Milo Ned Otto Paul Rafi Simon Tim Ulf Victor Walter Yan Zack Alex Bob Colin David"
    " Erik Frank Gus Harry Isaac John Kai Liam Mark Nick Owen Peter Robin Sam Tom Will Arthur"
    " James Lucas Oliver Ben Ali Hassan Marco"
)
# Building bricks of names nobody has seen: they teach the model to copy a name, not to recall it.
NAME_STARTS = _split("Al Bo Dri El Fa Gri Ha Il Ja Ko Lu Mo Ni Or Pa Ri So Ta Ul Vi Wa Zo Che")
NAME_ENDS = _split("ba din dra fen go kin la lon mir na nix per ra rik sha ta tis vo win zo")

ADJECTIVES = (
    "kind", "brave", "clever", "quiet", "curious", "cheerful", "careful", "shy", "patient",
    "lively", "gentle", "stubborn", "dreamy", "merry", "friendly",
)  # fmt: skip
ANIMALS = (
    "cat", "dog", "owl", "horse", "goat", "rabbit", "duck", "mouse", "fox", "hen", "sheep",
    "squirrel", "frog", "swan", "hedgehog", "lamb", "donkey", "robin", "badger", "otter", "pig",
    "bear", "deer", "parrot", "dragon", "turtle", "goose", "calf", "kitten", "puppy",
)  # fmt: skip
COLOURS = (
    "red", "blue", "green", "yellow", "white", "brown", "silver", "golden", "purple", "orange",
    "black", "grey", "pink",
)  # fmt: skip
THINGS = (
    "key", "ball", "hat", "kite", "ring", "book", "basket", "lantern", "drum", "scarf", "whistle",
    "cup", "boat", "coat", "bell", "map", "spoon", "coin", "flute", "doll", "umbrella", "glove",
    "button", "watch", "box", "ribbon", "mirror", "pencil", "marble", "stone", "feather", "shoe",
)  # fmt: skip
PLACES = {
    "the market": ("under the fruit stall", "behind a barrel", "next to the fountain"),
    "the river": ("in the reeds", "under a flat stone", "on the muddy bank"),
    "the old bridge": ("under the first arch", "between two stones", "beside the steps"),
    "the forest": ("under an oak tree", "beside a mossy log", "in a hollow tree"),
    "the lake": ("in the wet sand", "behind a big rock", "under some water lilies"),
    "the hill": ("in the tall grass", "beside the path", "under a bush"),
    "the well": ("behind the bucket", "beside the wall", "under the bench"),
    "the harbour": ("inside an old boat", "under a net", "behind the crates"),
    "the orchard": ("at the foot of an apple tree", "in a heap of leaves", "beside the fence"),
    "the library": ("between two books", "under the big table", "on the highest shelf"),
    "the mill": ("behind a sack of flour", "beside the wheel", "under the stairs"),
    "the meadow": ("among the daisies", "in the long grass", "beside a molehill"),
    "the school": ("under a desk", "behind the door", "beside the stove"),
    "the barn": ("in the hay", "behind the cart", "under the ladder"),
    "the lighthouse": ("on the stairs", "behind the great lamp", "on the rocks"),
    "the bakery": ("behind the oven", "under the counter", "in the flour bin"),
}  # fmt: skip
FOODS = (
    "apples", "plums", "cakes", "pears", "buns", "nuts", "cherries", "eggs", "carrots", "cookies",
    "rolls", "tomatoes", "peaches", "onions", "potatoes", "lemons",
)  # fmt: skip
WEATHER = (
    "The sun was warm and the sky was blue.", "The sun shone on the roofs.",
    "There was not a cloud in the sky.", "Rain was falling on the roofs.",
    "It had been raining since the morning.", "The streets were full of puddles.",
    "The wind was blowing from the lake.", "A strong wind shook the trees.",
    "Snow lay on every roof.", "It was cold, and the grass was white with frost.",
    "A thin fog lay over the village.", "The air smelled of fresh bread.",
    "The birds were singing in the trees.", "Bees were humming in the gardens.",
    "The leaves were turning red and gold.", "It was so quiet that one could hear the river.",
)  # fmt: skip
TIMES = (
    "One morning", "One afternoon", "One evening", "One day", "Early one morning", "On Monday",
    "On Saturday", "Last week", "One summer day", "One autumn day", "One winter morning",
    "One spring day", "After school", "Before breakfast", "On market day", "On Sunday",
)  # fmt: skip
