"""The words of the demo corpus, in lists; they vary in length on purpose, so that a choice moves what follows it."""

NAMES = ("Mia", "Tom", "Ana", "Leo", "Ivy", "Max", "Zoe", "Ben", "Nora", "Finn", "Lucy", "Omar", "Rosa", "Hugo", "Tess",
         "Carl", "Gina", "Ravi", "Olga", "Sven", "Martha", "Edgar", "Bianca", "Winston")  # fmt: skip

ANIMALS = ("fox", "cat", "dog", "owl", "bear", "goat", "duck", "horse", "mouse", "rabbit", "parrot", "turtle", "badger",
           "hedgehog", "squirrel", "crocodile")  # fmt: skip

PLACES = ("lake", "hill", "barn", "mill", "river", "forest", "market", "castle", "harbor", "orchard", "old bridge",
          "quiet valley")  # fmt: skip

ADJECTIVES = ("shy", "tiny", "brave", "hungry", "sleepy", "very old", "cheerful", "one-eyed")
OBJECTS = ("map", "bell", "red kite", "lantern", "silver key", "wooden spoon", "blue ribbon", "jar of honey",
           "broken umbrella", "letter")  # fmt: skip
MEETINGS = ("met", "saw", "ran into", "made friends with", "bumped into")
NEARNESS = ("near", "by", "not far from", "right behind", "at the edge of")
CONNECTIVES = ("Then", "Soon", "After a while", "All at once", "The next day", "Without a word")
FINDINGS = ("found", "dug up", "was holding", "brought", "pointed at")
DEEDS = ("carried", "took", "sent", "threw", "pulled")
GOALS = ("up the stairs", "home", "to the queen", "across the field", "into the water", "to a friend")
MOODS = ("happy", "proud", "a bit sad", "tired", "full of joy", "safe and warm")

SORTABLE = ("apple", "arrow", "bread", "brick", "candle", "corn", "desk", "drum", "eagle", "fig", "flute", "glass",
            "grape", "hammer", "ink", "island", "jacket", "kiwi", "lemon", "lamp", "mango", "nest", "needle", "olive",
            "onion", "pear", "piano", "queen", "radish", "rope", "salt", "spoon", "tiger", "tulip", "umbrella",
            "violin", "wagon", "walnut", "yarn", "zebra")  # fmt: skip

SORT_CLOSINGS = ("", "\nThe first is {first}.", "\nFrom {first} to {last}.", "\nThat makes {count} {noun}.",
                 "\nThe first is {first} and the last is {last}.")  # fmt: skip

THINGS = ("apples", "books", "cards", "eggs", "marbles", "pencils", "shells", "stamps", "coins", "buttons")

TALE_OPENINGS = ("{name} starts with {start}.", "At first there are {start} {things}.", "We begin at {start}.",
                 "There are {start} {things} in the hands of {name}.")  # fmt: skip
TALE_ADDITIONS = ("Then {more} more come: {start} + {more} = {middle}.", "{start} + {more} = {middle} {things}.",
                  "Adding {more} gives {start} + {more} = {middle}.",
                  "Now add: {start} + {more} = {middle}.")  # fmt: skip
TALE_SUBTRACTIONS = ("{middle} - {fewer} = {end}.", "Take away {fewer}: {middle} - {fewer} = {end}.",
                     "After losing {fewer} {things}, {middle} - {fewer} = {end}.",
                     "So {middle} - {fewer} = {end}.")  # fmt: skip
TALE_CLOSINGS = ("{name} has {end} {things}.", "The answer is {end}.", "That leaves {end} {things} for {name}.",
                 "In the end: {end}.")  # fmt: skip
DIGIT_OPENINGS = ("We look for {asked}.", "Digit by digit:", "Write {left} and {right}.", "First the ones.")
DIGIT_STEPS = ("Ones: {low}. Tens: {high}.", "The ones give {low} and the tens give {high}.",
               "{low} for the ones, then {high} for the tens.")  # fmt: skip
DIGIT_CLOSINGS = ("So {asked} = {result}.", "The result is {result}.", "Together: {result}.",
                  "Answer: {asked} is {result}.")  # fmt: skip

CITIES = ("Oslo", "Rome", "Lima", "Paris", "Quito", "Cairo", "Boston", "Dublin", "Havana", "Nairobi", "Toronto",
          "San Marino")  # fmt: skip
JOBS = ("cook", "pilot", "baker", "nurse", "farmer", "teacher", "plumber", "night guard")
COLORS = ("red", "blue", "green", "black", "yellow", "purple", "dark gray")
NOTES = ("", "", " (new)", " (to check)", " (same as before)")
GROUPS = ("alpha", "north", "red team", "b2", "evening", "no group")

CODE_VERBS = ("get", "make", "find", "pick", "build", "run", "compute", "handle")
CODE_NOUNS = ("list", "values", "scores", "prices", "numbers", "steps", "rows", "answer", "points", "weights")
LIST_NAMES = ("nums", "items", "values", "data")
LOOP_NAMES = ("x", "n", "item", "value")
RESULT_NAMES = ("out", "result", "total", "answer")
